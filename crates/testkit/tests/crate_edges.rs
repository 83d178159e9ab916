//! Compares the dependencies of Jiffy's crates with the allowed ones, by `cargo metadata`.

use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

/// Crate and the crates of Jiffy that it may depend on. Tests may depend on any.
const ALLOWED: &[(&str, &[&str])] = &[
    ("wire", &[]),
    ("sys", &[]),
    ("jail", &[]),
    ("devices", &["sys"]),
    ("vmm", &["devices", "sys", "wire"]),
    ("disk", &["devices", "jail", "sys"]),
    ("files", &["jail", "sys", "wire"]),
    ("ext4", &[]),
    ("store", &["sys", "wire"]),
    ("pager", &["jail", "registry", "store", "sys", "wire"]),
    ("oci", &[]),
    ("registry", &["oci", "sys"]),
    ("rootfs", &["oci"]),
    ("import", &["jail", "rootfs", "sys", "wire"]),
    ("kernel", &[]),
    ("guest", &["wire", "sys"]),
    ("net", &["wire", "sys"]),
    (
        "content",
        &["wire", "store", "registry", "kernel", "sys", "ext4"],
    ),
    (
        "vmhost",
        &["content", "jail", "kernel", "net", "store", "sys", "wire"],
    ),
    (
        "node",
        &["vmhost", "content", "wire", "store", "registry", "sys"],
    ),
    ("api", &["node", "vmhost", "content", "wire", "sys"]),
    ("proxy", &["node", "vmhost", "content", "wire", "sys"]),
    (
        "jiffyd",
        &["api", "proxy", "node", "vmhost", "net", "content", "sys"],
    ),
    ("machine", &["wire", "sys"]),
    ("cli", &["wire", "machine", "kernel", "sys"]),
    ("ssh-guest", &[]),
    ("sched", &["jail", "wire"]),
    ("ssh", &["cli", "ssh-guest", "wire", "sys"]),
];

/// Crates that may depend on all others: the harness, the benchmark and the fuzz targets.
const UNRESTRICTED: &[&str] = &["testkit", "bench", "fuzz"];

#[test]
fn crates_import_only_allowed_crates() {
    let edges = edges();
    let known: BTreeSet<&str> = ALLOWED
        .iter()
        .map(|(name, _)| *name)
        .chain(UNRESTRICTED.iter().copied())
        .collect();
    let mut wrong = Vec::new();
    for (name, imports) in &edges {
        if !known.contains(name.as_str()) {
            wrong.push(format!("the crate {name} is not in ALLOWED"));
        }
        let Some((_, allowed)) = ALLOWED.iter().find(|(krate, _)| krate == name) else {
            continue;
        };
        for import in imports {
            if !allowed.contains(&import.as_str()) {
                wrong.push(format!("{name} imports {import}"));
            }
        }
    }
    for (name, _) in ALLOWED {
        if !edges.contains_key(*name) {
            wrong.push(format!(
                "ALLOWED lists the crate {name}, which does not exist"
            ));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn the_command_line_and_the_node_never_link_the_vmm_or_unpack_layers() {
    let edges = edges();
    for start in ["cli", "jiffyd"] {
        let mut reached = BTreeSet::new();
        let mut ahead = vec![start.to_owned()];
        while let Some(name) = ahead.pop() {
            if reached.insert(name.clone()) {
                ahead.extend(edges.get(&name).into_iter().flatten().cloned());
            }
        }
        for barred in ["vmm", "rootfs"] {
            assert!(
                !reached.contains(barred),
                "{start} reaches {barred} by {reached:?}"
            );
        }
    }
}

#[test]
fn contributing_gives_a_reason_for_each_dependency() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let page = std::fs::read_to_string(root.join("CONTRIBUTING.md")).expect("it is read");
    let (_, table) = page
        .split_once("\n| dependency | reason |\n|---|---|\n")
        .expect("CONTRIBUTING.md has the table");
    let mut documented = BTreeSet::new();
    for row in table.lines().take_while(|line| line.starts_with('|')) {
        let cells: Vec<&str> = row.split('|').map(str::trim).collect();
        let [_, names, reason, _] = cells[..] else {
            panic!("not a row of two cells: {row}");
        };
        assert!(!reason.is_empty(), "no reason: {row}");
        for name in names.split(", ") {
            let name = name.trim_matches('`').to_owned();
            assert!(
                documented.insert(name),
                "a dependency is listed twice: {row}"
            );
        }
    }
    let used: BTreeSet<String> = packages()
        .iter()
        .flat_map(dependencies)
        .filter(|dependency| !dependency.starts_with("jiffy-"))
        .collect();
    let undocumented: Vec<_> = used.difference(&documented).collect();
    let unused: Vec<_> = documented.difference(&used).collect();
    assert!(
        undocumented.is_empty() && unused.is_empty(),
        "CONTRIBUTING.md gives no reason for {undocumented:?}, and one for {unused:?}, which no crate uses"
    );
}

/// Names of all dependencies of a package, including those of its tests.
fn dependencies(package: &Value) -> Vec<String> {
    let dependencies = package["dependencies"].as_array();
    let names = dependencies.expect("a list").iter().map(|one| &one["name"]);
    names
        .filter_map(|name| Some(name.as_str()?.to_owned()))
        .collect()
}

/// Jiffy's crates, as cargo describes them.
fn packages() -> Vec<Value> {
    let output = Command::new(env!("CARGO"))
        .args([
            "metadata",
            "--format-version",
            "1",
            "--no-deps",
            "--offline",
        ])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .expect("cargo runs");
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let mut metadata: Value = serde_json::from_slice(&output.stdout).expect("cargo prints JSON");
    let packages = metadata["packages"].as_array_mut();
    std::mem::take(packages.expect("there are packages"))
}

/// Normal and build dependencies between Jiffy's crates, without the prefix `jiffy-`.
fn edges() -> BTreeMap<String, BTreeSet<String>> {
    let ours = |name: &Value| match name.as_str()? {
        "jiffyd" => Some("jiffyd".to_owned()),
        name => name.strip_prefix("jiffy-").map(String::from),
    };
    packages()
        .iter()
        .filter_map(|package| {
            let dependencies = package["dependencies"].as_array()?;
            let imports = dependencies
                .iter()
                .filter(|dependency| dependency["kind"] != "dev")
                .filter_map(|dependency| ours(&dependency["name"]))
                .collect();
            Some((ours(&package["name"])?, imports))
        })
        .collect()
}
