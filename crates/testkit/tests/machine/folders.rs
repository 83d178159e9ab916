//! Folders of the host in VMs.

use crate::support::{Jiffy, jiffy};

/// A folder on the host, which is the machine.
const HOST: &str = "/tests/shared";

/// Runs a shell script in the VM and returns its output, errors included.
fn exec(jiffy: &Jiffy, script: &str) -> String {
    let script = format!("exec 2>&1; {script}");
    jiffy.ok(&["exec", "dev", "sh", "-c", &script])
}

/// A VM with an empty folder of the host on /src.
fn sharing(jiffy: &Jiffy, more: &[&str]) {
    jiffy.sh(&format!("rm -rf {HOST}; mkdir -p {HOST}"));
    let shared = format!("{HOST}:/src");
    let run = ["run", "-d", "--name", "dev", "-v", &shared];
    jiffy.ok(&[&run[..], more].concat());
}

/// Waits until no process serves a folder. A server ends by itself when its VMM has ended.
fn wait_for_servers_end(jiffy: &Jiffy) {
    jiffy.eventually("no folder is served", || {
        jiffy.sh("ps | grep -c '[j]iffy-files' || true") == "0"
    });
}

#[test]
fn a_vm_and_its_host_work_in_one_folder() {
    let jiffy = jiffy();
    sharing(&jiffy, &[]);
    jiffy.sh(&format!(
        "cd {HOST}; echo hello > file; ln -s file link; mkdir sub"
    ));
    let script = "cat /src/link; ls /src; echo made > /src/sub/new; mv /src/sub/new /src/sub/moved; \
                  ln /src/file /src/twin; chmod 640 /src/file; chown 12:34 /src/file; \
                  stat -c '%a %u %g %h' /src/file";
    assert_eq!(exec(&jiffy, script), "hello\nfile\nlink\nsub\n640 12 34 2");
    let seen = jiffy.sh(&format!(
        "cd {HOST}; cat sub/moved; stat -c '%a %u %g %h' twin"
    ));
    assert_eq!(seen, "made\n640 12 34 2");
    // Large files, in both directions; the page cache of neither side is in the way.
    let guests = exec(
        &jiffy,
        "dd if=/dev/urandom of=/src/large bs=64k count=80 2>/dev/null; md5sum < /src/large",
    );
    assert_eq!(jiffy.sh(&format!("md5sum < {HOST}/large")), guests);
    jiffy.sh(&format!(
        "dd if=/dev/urandom of={HOST}/other bs=1M count=5 2>/dev/null"
    ));
    let hosts = jiffy.sh(&format!("md5sum < {HOST}/other"));
    assert_eq!(exec(&jiffy, "md5sum < /src/other"), hosts);
    // A program of the guest runs from the folder, and maps it.
    let script = "cp /bin/busybox /src/busybox; /src/busybox echo ran; rm -r /src/sub; ls /src/sub";
    let said = exec(&jiffy, &format!("{script} || true"));
    assert!(
        said.starts_with("ran\n") && said.contains("No such file"),
        "{said}"
    );
    // Links that lead out lead to the guest's own files.
    jiffy.sh(&format!(
        "cd {HOST}; ln -s /proc/sys/kernel/hostname absolute; ln -s ../proc/sys/kernel/hostname up"
    ));
    let script = "cat /src/absolute /src/up /src/../proc/sys/kernel/hostname";
    assert_eq!(exec(&jiffy, script), "dev\ndev\ndev");
    jiffy.ok(&["stop", "dev"]);
    wait_for_servers_end(&jiffy);
    jiffy.ok(&["start", "dev"]);
    assert_eq!(exec(&jiffy, "cat /src/file"), "hello");
    jiffy.ok(&["rm", "-f", "dev"]);
    wait_for_servers_end(&jiffy);
}

#[test]
fn a_read_only_folder_is_not_changed() {
    let jiffy = jiffy();
    let mount = format!("type=bind,source={HOST},target=/ro,readonly");
    sharing(&jiffy, &["--mount", &mount]);
    jiffy.sh(&format!("echo hello > {HOST}/file"));
    let script = "cat /ro/file; echo x > /ro/file; rm /ro/file; \
                  mount -o remount,rw /ro; touch /ro/new; cat /src/file";
    let said = exec(&jiffy, &format!("{script} || true"));
    assert!(
        said.starts_with("hello\n") && said.ends_with("\nhello"),
        "{said}"
    );
    assert_eq!(said.matches("Read-only file system").count(), 3, "{said}");
    assert_eq!(jiffy.sh(&format!("ls {HOST}")), "file");
    jiffy.ok(&["rm", "-f", "dev"]);
}

#[test]
fn without_the_server_only_the_folder_is_lost() {
    let jiffy = jiffy();
    sharing(&jiffy, &[]);
    jiffy.sh(&format!("echo hello > {HOST}/file"));
    // A daemon that dies takes nothing with it.
    jiffy.kill_all("jiffyd");
    assert_eq!(exec(&jiffy, "cat /src/file"), "hello");
    let refused = jiffy.run(&["snapshot", "create", "dev", "warm"]);
    assert_ne!(refused.code(), 0);
    let said = refused.error_text();
    assert!(
        said.contains(&format!("shares {HOST} with this host")),
        "{said}"
    );
    jiffy.kill_all("jiffy-files");
    let said = exec(&jiffy, "cat /src/file; ls /src; echo goes on");
    assert!(
        said.contains("not connected") && said.ends_with("goes on"),
        "{said}"
    );
    jiffy.ok(&["stop", "dev"]);
    jiffy.ok(&["start", "dev"]);
    assert_eq!(exec(&jiffy, "cat /src/file"), "hello");
    jiffy.ok(&["rm", "-f", "dev"]);
}

#[test]
fn a_captured_vm_goes_on_with_its_folder() {
    let jiffy = jiffy();
    let on_host = |script: &str| jiffy.sh(&format!("cd {HOST}; {script}"));
    let wait_for = |file: &str| on_host(&format!("until [ -e {file} ]; do sleep 0.1; done"));
    jiffy.sh(&format!("rm -rf {HOST}; mkdir -p {HOST}"));
    on_host("echo old > other; echo old > gone");
    // The guest knows a file's size for a second, and asks for it at a read, not at the sendfile
    // of busybox's cat.
    let program = "cd /src; echo first > kept; exec 3>>kept 4<other 5<gone; touch ready; \
                   until [ -e go ]; do sleep 0.1; done; sleep 2; \
                   echo last >&3; dd <&4 > read 2>/dev/null; cat <&5 > stale 2>&1; touch done; sleep 1000";
    let shared = format!("{HOST}:/src:capture");
    let run = ["run", "-d", "--name", "dev", "-v", &shared];
    jiffy.ok(&[&run[..], &["--", "sh", "-c", program]].concat());
    wait_for("ready");
    jiffy.ok(&["hibernate", "dev"]);
    wait_for_servers_end(&jiffy);
    on_host("echo changed while it slept > other; mv gone aside; echo another > gone; touch go");
    jiffy.ok(&["wake", "dev"]);
    wait_for("done");
    let seen = on_host("cat kept read stale");
    assert!(
        seen.starts_with("first\nlast\nchanged while it slept\n"),
        "{seen}"
    );
    assert!(seen.contains("Stale file handle"), "{seen}");
    assert_eq!(
        exec(&jiffy, "cat /src/gone; cat /src/aside"),
        "another\nold"
    );

    // A snapshot continues with any folder of the host, here with an empty one.
    jiffy.ok(&["snapshot", "create", "dev", "shared"]);
    jiffy.ok(&["rm", "-f", "dev"]);
    let refused = jiffy.run(&["run", "-d", "--name", "dev", "--from", "shared"]);
    assert!(refused.error_text().contains("-v HOST:/src"));
    let other = format!("{HOST}-2");
    jiffy.sh(&format!("rm -rf {other}; mkdir {other}"));
    let shared = format!("{other}:/src");
    jiffy.ok(&[
        "run", "-d", "--name", "dev", "--from", "shared", "-v", &shared,
    ]);
    let said = exec(&jiffy, "ls /src; echo new > /src/new; cat /src/new");
    assert_eq!(said, "new");
    assert_eq!(jiffy.sh(&format!("cat {other}/new")), "new");
    jiffy.ok(&["rm", "-f", "dev"]);
    jiffy.ok(&["snapshot", "rm", "shared"]);
}
