//! Package managers in a VM, with the registries that this host's own use.

use crate::{LOOPBACK, Vm, debian, run};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Each with a script that fetches a small package into an empty folder, here and in a VM.
const MANAGERS: [(&str, &str); 4] = [
    ("apt-get", "apt-get -q download hello"),
    (
        "pip",
        "python3 -m pip download -q --no-deps --no-cache-dir six",
    ),
    ("npm", "npm install --cache=./cache is-number"),
    // Without a compiler.
    (
        "cargo",
        "mkdir src; touch src/lib.rs
         printf '[package]\\nname = \"a\"\\n[dependencies]\\nitoa = \"1\"\\n' >Cargo.toml
         CARGO_HOME=./home cargo vendor",
    ),
];
/// What each leaves in its folder.
const FETCHED: [&str; 4] = [
    "hello_*.deb",
    "six-*.whl",
    "node_modules/is-number",
    "vendor/itoa",
];

/// Beginnings of the names of variables that choose a registry, a proxy or a limit of time.
const VARIABLES: [&str; 8] = [
    "http_",
    "https_",
    "no_proxy",
    "all_proxy",
    "pip_",
    "npm_config_",
    "cargo_registr",
    "cargo_http",
];
/// Files in the home that choose registries.
const FILES: [&str; 3] = [".config/pip/pip.conf", ".npmrc", ".cargo/config.toml"];
const AUTHORITIES: &str = "/etc/ssl/certs/ca-certificates.crt";

#[test]
fn package_managers_reach_what_this_host_reaches() {
    let reached: Vec<bool> = MANAGERS.iter().map(|(_, script)| here(script)).collect();
    if !reached.contains(&true) {
        println!("no package manager of this host reaches a registry: nothing was tested");
        return;
    }
    let debian = debian();
    // A registry of this host's network has a private address, which VMs reach if they may.
    let options = ["-m", "512M", "--allow", "all"];
    let vm = debian.start_vm("packages", &options, &["sleep", "100000"]);
    configure(&vm);
    for ((name, script), (reached, fetched)) in
        MANAGERS.iter().zip(reached.into_iter().zip(FETCHED))
    {
        if !reached {
            println!("{name}: this host reaches no registry");
            continue;
        }
        match *name {
            "apt-get" => drop(vm.sh("apt-get -q update")),
            "cargo" => vm.copy(&toolchain().join("bin/cargo"), "/usr/local/bin/cargo"),
            _ => {}
        }
        let variables = variables();
        let exports: Vec<&str> = variables.iter().flat_map(|one| ["-e", one]).collect();
        let script = format!("mkdir /tmp/{name}; cd /tmp/{name}; {script}; ls -d {fetched}");
        let exec = [&["exec"], &exports[..], &["packages", "sh", "-ec", &script]].concat();
        println!("{name}: {}", debian.host.ok(&exec));
    }
}

/// Whether that package manager of this host exists and reaches its registry.
fn here(script: &str) -> bool {
    let folder = tempfile::tempdir().expect("a folder");
    let ended = Command::new("timeout")
        .args(["100", "sh", "-ec", script])
        .current_dir(folder.path())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    ended.expect("sh runs").success()
}

/// The folder of this host's Rust: a `cargo` on the PATH may be rustup's.
fn toolchain() -> PathBuf {
    run(Command::new("rustc").args(["--print", "sysroot"])).into()
}

/// Gives the VM's package managers the settings of this host's. The image's `sources.list` is made
/// of this host's.
fn configure(vm: &Vm<'_>) {
    let settings = run(Command::new("apt-config").args(["dump", "Acquire"]));
    let settings: Vec<&str> = settings
        .lines()
        .filter(|line| line.starts_with("Acquire::http") || line.starts_with("Acquire::Check-"))
        // Translations are as large as the lists.
        .chain(["Acquire::Languages \"none\";"])
        .collect();
    let folder = tempfile::tempdir().expect("a folder");
    let apt = folder.path().join("host");
    std::fs::write(&apt, settings.join("\n")).expect("written");
    vm.copy(&apt, "/etc/apt/apt.conf.d/99host");
    let home = PathBuf::from(std::env::var_os("HOME").expect("a home"));
    vm.sh("mkdir -p /root/.config/pip /root/.cargo");
    let files = FILES.map(|file| (home.join(file), format!("/root/{file}")));
    let others = ["/etc/pip.conf", AUTHORITIES].map(|path| (path.into(), path.into()));
    for (from, to) in files.iter().chain(&others) {
        if Path::exists(from) {
            vm.copy(from, to);
        }
    }
}

/// Variables of package managers, `NAME=VALUE`.
fn variables() -> Vec<String> {
    let chosen = std::env::vars().filter(|(name, _)| {
        let name = name.to_lowercase();
        VARIABLES.iter().any(|begin| name.starts_with(begin))
    });
    // A proxy on this host's loopback.
    let here = |value: String| {
        let value = value.replace("//localhost", &format!("//{LOOPBACK}"));
        value.replace("//127.0.0.1", &format!("//{LOOPBACK}"))
    };
    let chosen = chosen.map(|(name, value)| format!("{name}={}", here(value)));
    // npm has authorities of its own.
    chosen
        .chain([format!("NODE_EXTRA_CA_CERTS={AUTHORITIES}")])
        .collect()
}
