//! Debian's `dockerd` in a VM with the kernel `full`.

use crate::installation::free_port;
use crate::{LOOPBACK, ask, debian, eventually, run};
use std::fs;
use std::path::Path;
use std::process::Command;

/// A web server that answers with the name of its container.
const SERVE: &str = "hostname >/index.html; exec httpd -f -h / -p 8080";
/// Starts both daemons. `dockerd` would wait for its containerd for 15 s only, which is too short
/// where everything is emulated.
const START: &str = "containerd & \
    until ctr version >/dev/null 2>&1; do sleep 1; done; \
    exec dockerd --containerd /run/containerd/containerd.sock --insecure-registry \"$0\"";

#[test]
fn docker_pulls_from_a_registry_of_the_host_and_publishes_a_port() {
    let debian = debian();
    let image = push_image(debian.registry.host());
    let registry = image.split_once('/').expect("a host").0;
    debian.host.ok(&["kernel", "build", "full"]);
    let port = free_port().to_string();
    let publish = format!("{port}:80");
    let vm = debian.start_vm(
        "docker",
        &[
            &["--kernel", "full", "-m", "1G"][..],
            // Docker's layers can't be on the VM's root, which is itself an overlay.
            &["--disk", "docker:4G,mount=/var/lib/docker"],
            &["-p", &publish, "--allow", registry],
        ]
        .concat(),
        &["sh", "-c", START, registry],
    );
    eventually("dockerd", || {
        let version = ["exec", "docker", "docker", "version"];
        debian.host.run(&version).status.success()
    });
    let info = vm.sh("docker info --format '{{.Driver}} {{.CgroupVersion}}'");
    assert_eq!(info, "overlay2 2");
    vm.sh(&format!("docker pull -q {image}"));
    vm.sh(&format!(
        "docker run -d --name web -m 32M -p 80:8080 {image}"
    ));
    let id = vm.sh("docker inspect --format '{{.Config.Hostname}}' web");
    let url = format!("http://127.0.0.1:{port}/");
    assert_eq!(ask(&["curl", "-sSf", "-m", "100", &url]), id);

    // Containers reach others by Docker's bridge and the VM's link, and the node's name server.
    let ask_others = format!(
        "nslookup host.jiffy.internal
         wget -qO- http://{registry}/v2/tests/web/tags/list
         cat /sys/fs/cgroup/memory.max"
    );
    let said = vm.sh(&format!("docker exec web sh -c '{ask_others}'"));
    assert!(said.contains("Address: 10."), "{said}");
    assert!(
        said.contains(r#"{"name":"tests/web","tags":["1"]}"#),
        "{said}"
    );
    // A control group of its own limits its memory.
    assert!(said.ends_with(&(32 << 20).to_string()), "{said}");

    // They sleep and wake with the VM.
    debian.host.ok(&["hibernate", "docker"]);
    debian.host.ok(&["wake", "docker"]);
    assert_eq!(ask(&["curl", "-sSf", "-m", "100", &url]), id);
}

/// Pushes an image with busybox to the registry; returns its reference for VMs.
fn push_image(registry: &str) -> String {
    let folder = tempfile::tempdir().expect("a folder");
    let root = folder.path().join("root");
    for name in ["bin", "etc", "tmp"] {
        fs::create_dir_all(root.join(name)).expect("made");
    }
    fs::copy("/bin/busybox", root.join("bin/busybox")).expect("busybox-static is installed");
    for applet in ["sh", "hostname", "httpd", "nslookup", "wget", "cat"] {
        std::os::unix::fs::symlink("busybox", root.join("bin").join(applet)).expect("linked");
    }
    let tar = folder.path().join("layer.tar");
    let pack = ["--owner=0", "--group=0", "-cf"];
    run(Command::new("tar")
        .arg("-C")
        .arg(&root)
        .args(pack)
        .args([&tar, Path::new(".")]));
    let layout = folder.path().join("layout").display().to_string();
    let image = format!("{layout}:1");
    let umoci = |words: &[&str]| run(Command::new("umoci").args(words));
    umoci(&["init", "--layout", &layout]);
    umoci(&["new", "--image", &image]);
    let tar = tar.display().to_string();
    umoci(&["raw", "add-layer", "--image", &image, &tar]);
    let command = ["sh", "-c", SERVE].map(|word| format!("--config.cmd={word}"));
    let command: Vec<&str> = command.iter().map(String::as_str).collect();
    umoci(&[&["config", "--image", &image], &command[..]].concat());
    let copy = ["copy", "--quiet", "--dest-tls-verify=false"];
    let target = format!("docker://{registry}/tests/web:1");
    run(Command::new("skopeo")
        .args(copy)
        .args([format!("oci:{image}"), target]));
    let port = registry.rsplit_once(':').expect("a port").1;
    format!("{LOOPBACK}:{port}/tests/web:1")
}
