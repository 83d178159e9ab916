//! Servers of the image, by their published ports.

use crate::installation::free_port;
use crate::{ask, debian, eventually, run};
use serde_json::Value;
use std::process::Command;

#[test]
fn published_ports_serve_curl_dig_and_iperf3_over_tcp_and_udp() {
    let debian = debian();
    let [http, names, iperf] = [free_port(), free_port(), free_port()].map(|it| it.to_string());
    let ports = [
        format!("{http}:80"),
        format!("{names}:53"),
        format!("{names}:53/udp"),
        format!("{iperf}:5201"),
        format!("{iperf}:5201/udp"),
    ];
    let options: Vec<&str> = ports.iter().flat_map(|port| ["-p", port]).collect();
    let vm = debian.start_vm("servers", &options, &["sleep", "100000"]);
    vm.sh("echo from nginx >/var/www/html/index.html; nginx
         dnsmasq --user=root --no-resolv --no-hosts --address=/printer.example/192.0.2.7
         iperf3 --server --daemon");

    let url = format!("http://127.0.0.1:{http}/");
    assert_eq!(ask(&["curl", "-sSf", "-m", "100", &url]), "from nginx");
    for transport in ["+notcp", "+tcp"] {
        let dig = ["dig", "@127.0.0.1", "-p", &names, transport, "+short"];
        let answer = ask(&[&dig[..], &["printer.example"]].concat());
        assert_eq!(answer, "192.0.2.7", "{transport}");
    }
    // From this host to the VM and back. The datagrams fit into the socket's buffer, so none is lost.
    let udp = ["--udp", "-l", "1200", "-b", "1M", "-n", "100K"];
    for options in [
        &udp[..],
        &[&udp[..], &["--reverse"]].concat(),
        &["-n", "2M"],
        &["-n", "2M", "--reverse"],
    ] {
        let iperf3 = ["iperf3", "--json", "-c", "127.0.0.1", "-p", &iperf];
        let iperf3 = [&iperf3[..], options].concat();
        let mut report = Value::Null;
        // The server listens again only after it has finished with the previous client.
        eventually("iperf3", || {
            report = serde_json::from_str(&ask(&iperf3)).expect("JSON");
            report["error"].is_null()
        });
        let (total, sent) = match options[0] {
            "--udp" => (&report["end"]["sum"], 100_000),
            _ => (&report["end"]["sum_sent"], 2 << 20),
        };
        assert!(
            total["bytes"].as_u64() >= Some(sent),
            "{options:?}: {report}"
        );
        if options[0] == "--udp" {
            assert_eq!(total["lost_packets"], 0, "{options:?}: {report}");
        }
    }
}

#[test]
fn openssh_in_the_image_serves_ssh_and_rsync() {
    let debian = debian();
    let port = free_port().to_string();
    let publish = format!("{port}:22");
    let vm = debian.start_vm("sshd", &["-p", &publish], &["sleep", "100000"]);
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name);
    run(Command::new("ssh-keygen")
        .args(["-q", "-t", "ed25519", "-N", "", "-f"])
        .arg(path("key")));
    vm.sh("mkdir -p -m 700 /root/.ssh /run/sshd; rm -f /etc/ssh/ssh_host_*; ssh-keygen -q -A");
    vm.copy(&path("key.pub"), "/root/.ssh/authorized_keys");
    vm.sh("chown root: /root/.ssh/authorized_keys; /usr/sbin/sshd");

    let key = path("key").to_str().expect("UTF-8").to_owned();
    let known = format!("UserKnownHostsFile={}", path("known").display());
    let options = ["-p", &port, "-i", &key, "-o", &known, "-o", "BatchMode=yes"];
    let accept = ["-o", "StrictHostKeyChecking=accept-new"];
    let ssh = [&["ssh"], &options[..], &accept].concat();
    let said = ask(&[
        &ssh[..],
        &["root@127.0.0.1", "hostname; echo $SSH_CONNECTION"],
    ]
    .concat());
    let lines: Vec<&str> = said.lines().collect();
    assert_eq!(lines[0], "sshd");
    // It is the server's own port, not the agent.
    assert!(lines[1].ends_with(" 22"), "{said}");

    let sent: Vec<u8> = (0..300_000u32).map(|i| (i % 251) as u8).collect();
    std::fs::create_dir(path("tree")).expect("made");
    std::fs::write(path("tree/file"), &sent).expect("written");
    std::os::unix::fs::symlink("file", path("tree/link")).expect("linked");
    for (from, to) in [
        ("tree", "root@127.0.0.1:"),
        ("root@127.0.0.1:tree/", "back"),
    ] {
        run(Command::new("rsync")
            .args(["-a", "-e", &ssh.join(" "), from, to])
            .current_dir(folder.path()));
    }
    assert!(std::fs::read(path("back/link")).expect("the copy") == sent);
}
