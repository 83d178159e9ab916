//! Which room has a door to which: held against `cargo metadata`.

use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

/// Crate → the crates of ours it may import. Tests may import what they like.
const DOORS: &[(&str, &[&str])] = &[
    ("wire", &[]),
    ("sys", &[]),
    ("devices", &["sys"]),
    ("vmm", &["devices", "sys", "wire"]),
    ("disk", &["devices", "sys"]),
    ("ext4", &[]),
    ("store", &["sys", "wire"]),
    ("pager", &["registry", "store", "sys", "wire"]),
    ("registry", &["sys"]),
    ("rootfs", &[]),
    ("kernel", &[]),
    ("guest", &["wire", "sys"]),
    (
        "node",
        &[
            "wire", "store", "rootfs", "registry", "kernel", "sys", "ext4",
        ],
    ),
    ("machine", &["wire", "sys"]),
    ("cli", &["wire", "machine", "kernel", "sys"]),
];

/// Crates that look at all the others: the harness and the benchmark.
const ANYWHERE: &[&str] = &["testkit", "bench"];

#[test]
fn crates_import_only_what_they_may() {
    let edges = edges();
    let known: BTreeSet<&str> = DOORS
        .iter()
        .map(|(name, _)| *name)
        .chain(ANYWHERE.iter().copied())
        .collect();
    let mut wrong = Vec::new();
    for (name, imports) in &edges {
        if !known.contains(name.as_str()) {
            wrong.push(format!("the crate {name} has no place in the plan"));
        }
        let Some((_, allowed)) = DOORS.iter().find(|(room, _)| room == name) else {
            continue;
        };
        for import in imports {
            if !allowed.contains(&import.as_str()) {
                wrong.push(format!("{name} imports {import}"));
            }
        }
    }
    for (name, _) in DOORS {
        if !edges.contains_key(*name) {
            wrong.push(format!("the crate {name} is planned and missing"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn the_command_line_and_the_node_never_link_the_vmm() {
    let edges = edges();
    for start in ["cli", "node"] {
        let mut reached = BTreeSet::new();
        let mut ahead = vec![start.to_owned()];
        while let Some(name) = ahead.pop() {
            if reached.insert(name.clone()) {
                ahead.extend(edges.get(&name).into_iter().flatten().cloned());
            }
        }
        assert!(
            !reached.contains("vmm"),
            "{start} reaches vmm by {reached:?}"
        );
    }
}

/// Normal and build dependencies between our crates, `jiffy-` left out.
fn edges() -> BTreeMap<String, BTreeSet<String>> {
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
    let metadata: Value = serde_json::from_slice(&output.stdout).expect("cargo prints JSON");
    let ours = |name: &Value| name.as_str()?.strip_prefix("jiffy-").map(String::from);
    let packages = metadata["packages"].as_array().expect("there are packages");
    packages
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
