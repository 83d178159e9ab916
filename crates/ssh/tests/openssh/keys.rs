//! Authentication of users, and host keys.

use crate::node::{Node, stderr, stdout};
use std::fs;
use std::process::Command;

#[test]
fn another_key_is_refused() {
    let node = Node::start();
    let other = node.text("other");
    let made = Command::new("ssh-keygen")
        .args(["-q", "-t", "ed25519", "-N", "", "-f", &other])
        .status();
    assert!(made.unwrap().success());
    let config = fs::read_to_string(node.config()).unwrap();
    let right = node.text("data/ssh/id_ed25519");
    assert!(config.contains(&right), "{config}");
    fs::write(node.config(), config.replace(&right, &other)).unwrap();
    let output = node.openssh("ssh").args(["web.jiffy", "true"]).output();
    let output = output.unwrap();
    assert_eq!(output.status.code(), Some(255), "{output:?}");
    assert!(stderr(&output).contains("Permission denied (publickey)"));
}

#[test]
fn each_vm_has_its_own_lasting_host_key() {
    let node = Node::start();
    let line = |vm: &str| {
        let words = ["ssh-proxy", "--known-hosts=[a.host]:22", vm];
        stdout(&node.jiffy().args(words).output().unwrap())
    };
    let (name, web) = (line("web.jiffy"), line("web"));
    assert!(name.starts_with("[a.host]:22 ssh-ed25519 AAAA"), "{name}");
    // With any name and port.
    let ssh = node
        .openssh("ssh")
        .args(["-p", "2222", "web.jiffy", "true"])
        .output();
    assert!(ssh.as_ref().unwrap().status.success(), "{ssh:?}");
    assert_eq!(
        name.split_once(' ').unwrap().1,
        web.split_once(' ').unwrap().1
    );
    assert_ne!(
        web.split_once(' ').unwrap().1,
        line("db").split_once(' ').unwrap().1
    );
    // ssh refuses a server with another VM's key.
    let config = fs::read_to_string(node.config()).unwrap();
    let asks = "--known-hosts=%H -- ";
    let others = config.replace(&format!("{asks}%n"), &format!("{asks}db"));
    assert_ne!(others, config);
    fs::write(node.config(), others).unwrap();
    let ssh = node.openssh("ssh").args(["web.jiffy", "true"]).output();
    let output = ssh.unwrap();
    assert_eq!(output.status.code(), Some(255), "{output:?}");
    assert!(stderr(&output).contains("Host key verification failed"));
}

#[test]
fn the_ssh_config_of_one_vm_is_sufficient() {
    let node = Node::start();
    let config = stdout(&node.jiffy().args(["ssh-config", "web"]).output().unwrap());
    assert!(config.starts_with("Host web.jiffy\n"), "{config}");
    fs::write(node.config(), config).unwrap();
    let output = node
        .openssh("ssh")
        .args(["web.jiffy", "echo here"])
        .output();
    assert_eq!(stdout(&output.unwrap()), "here\n");
}
