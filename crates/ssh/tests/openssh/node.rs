//! A stand-in for jiffyd: it knows two VMs, and passes execs and copies to the agent.

use crate::harness::{Agent, TIMEOUT, build_small};
use jiffy_wire::agent::{self, OLDEST};
use jiffy_wire::api::{ApiError, ErrorKind};
use jiffy_wire::frame::to_vec;
use serde_json::json;
use std::fs;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::Shutdown;
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::OnceLock;
use std::thread;
use std::time::{Duration, Instant};

/// Names and ids of the VMs.
const VMS: [(&str, &str); 3] = [
    ("web", "0123456789ab"),
    ("db", "0123456789ac"),
    ("off", "0123456789ad"),
];

/// A node, and the folders of the `jiffy` that uses it.
pub struct Node {
    agent: Agent,
    folder: tempfile::TempDir,
}

/// Paths for a connection, which may outlive the node.
#[derive(Clone)]
struct Paths {
    agent: PathBuf,
    folder: PathBuf,
}

impl Node {
    pub fn start() -> Node {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        fs::create_dir(path("guest")).unwrap();
        fs::create_dir(path("lib")).unwrap();
        std::os::unix::fs::symlink(guest_program(), path("lib/jiffy-ssh-guest")).unwrap();
        fs::DirBuilder::new()
            .mode(0o700)
            .create(path("run"))
            .unwrap();
        let listener = UnixListener::bind(path("run/jiffyd.sock")).unwrap();
        let agent = Agent::start();
        let paths = Paths {
            agent: agent.path("agent"),
            folder: folder.path().to_owned(),
        };
        thread::spawn(move || {
            for connection in listener.incoming() {
                let paths = paths.clone();
                // The peer may have gone.
                thread::spawn(move || drop(paths.serve(connection.unwrap())));
            }
        });
        let node = Node { agent, folder };
        let config = node.jiffy().arg("ssh-config").output().unwrap();
        assert!(config.status.success(), "{config:?}");
        fs::write(node.config(), config.stdout).unwrap();
        node
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The path of a file, as text.
    pub fn text(&self, name: &str) -> String {
        self.path(name).to_str().unwrap().to_owned()
    }

    /// The file with the output of `jiffy ssh-config`.
    pub fn config(&self) -> PathBuf {
        self.path("ssh_config")
    }

    /// A program with this node's folders in its environment.
    pub fn program(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        for name in ["data", "run", "lib", "share"] {
            command.env(format!("JIFFY_{}", name.to_uppercase()), self.path(name));
        }
        command
            .env("JIFFY_MACHINE", "never")
            .env("SHELL", "/bin/sh")
            .env_remove("SSH_AUTH_SOCK")
            .stdin(Stdio::null());
        command
    }

    /// `jiffy-ssh`, which takes the arguments of `jiffy`.
    pub fn jiffy(&self) -> Command {
        self.program(env!("CARGO_BIN_EXE_jiffy-ssh"))
    }

    /// `jiffy ssh WORDS`, to its end.
    pub fn ssh(&self, words: &[&str]) -> Output {
        self.jiffy().arg("ssh").args(words).output().unwrap()
    }

    /// One of OpenSSH's programs, with the printed configuration.
    pub fn openssh(&self, program: &str) -> Command {
        let mut command = self.program(program);
        command.arg("-F").arg(self.config());
        command
    }

    /// Ids of the processes of the guest.
    pub fn guest_processes(&self) -> Vec<u32> {
        self.agent.children()
    }
}

/// Waits for a child, which must not take long.
pub fn wait(mut child: Child) -> Output {
    let begun = Instant::now();
    let (mut out, mut err) = (child.stdout.take(), child.stderr.take());
    let reading = thread::spawn(move || {
        let mut stdout = Vec::new();
        out.iter_mut()
            .for_each(|out| drop(out.read_to_end(&mut stdout)));
        stdout
    });
    let failing = thread::spawn(move || {
        let mut stderr = Vec::new();
        err.iter_mut()
            .for_each(|err| drop(err.read_to_end(&mut stderr)));
        stderr
    });
    let status = loop {
        match child.try_wait().unwrap() {
            Some(status) => break status,
            None if begun.elapsed() > TIMEOUT => {
                child.kill().unwrap();
                panic!("the program did not end in time");
            }
            None => thread::sleep(Duration::from_millis(5)),
        }
    };
    Output {
        status,
        stdout: reading.join().unwrap(),
        stderr: failing.join().unwrap(),
    }
}

/// Standard error, as text.
pub fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Standard output of a program that succeeded, as text.
pub fn stdout(output: &Output) -> String {
    assert!(output.status.success(), "{output:?}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// This many bytes that do not repeat.
pub fn bytes(count: usize) -> Vec<u8> {
    let mut state = 1u64;
    let mut bytes = Vec::with_capacity(count + 8);
    while bytes.len() < count {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        bytes.extend((state >> 16).to_le_bytes());
    }
    bytes.truncate(count);
    bytes
}

fn guest_program() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| build_small(&["-p", "jiffy-ssh-guest"], "jiffy-ssh-guest"))
}

impl Paths {
    fn serve(&self, mut client: UnixStream) -> io::Result<()> {
        let mut reader = BufReader::new(client.try_clone()?);
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            if reader.read_line(&mut head)? == 0 {
                return Ok(());
            }
        }
        let words: Vec<&str> = head.split(' ').take(2).collect();
        let (method, path) = (words[0], words[1].trim_start_matches("/v1/vms/"));
        let small = head.to_lowercase();
        let length = small.split("content-length: ").nth(1);
        let length = length.map_or(0, |rest| rest.lines().next().unwrap().parse().unwrap());
        let mut body = vec![0; length];
        reader.read_exact(&mut body)?;
        let (name, action) = path.split_once('/').unwrap_or((path, ""));
        let known = VMS.iter().find(|vm| vm.0 == name || vm.1 == name);
        let Some((name, id)) = known else {
            let error = ApiError {
                kind: ErrorKind::NotFound,
                message: format!("There is no VM {name:?}."),
                hint: None,
                retry_after_s: None,
                exit_code: None,
            };
            return respond(&mut client, 404, &serde_json::to_value(error)?);
        };
        if (method, action) == ("GET", "") {
            return respond(&mut client, 200, &vm(name, id));
        }
        let request = match action.split_once('=') {
            Some(("copy-in?path", path)) => agent::Request::CopyIn {
                version: OLDEST,
                path: self.in_guest(&path.replace("%2F", "/")),
            },
            _ => self.exec(&body),
        };
        let mut agent = UnixStream::connect(&self.agent)?;
        agent.write_all(&to_vec(&request).unwrap())?;
        client
            .write_all(b"HTTP/1.1 101 X\r\nconnection: upgrade\r\nupgrade: jiffy-frames\r\n\r\n")?;
        let (mut to_client, mut from_agent) = (client, agent.try_clone()?);
        let back = thread::spawn(move || {
            let _ = io::copy(&mut from_agent, &mut to_client);
            let _ = to_client.shutdown(Shutdown::Both);
        });
        let _ = io::copy(&mut reader, &mut agent);
        let _ = agent.shutdown(Shutdown::Both);
        back.join().unwrap();
        Ok(())
    }

    fn exec(&self, body: &[u8]) -> agent::Request {
        let mut command: agent::Command = serde_json::from_slice(body).unwrap();
        command.argv[0] = self.in_guest(&command.argv[0]);
        // Only root can switch users.
        if !rustix::process::geteuid().is_root() {
            command.user = None;
        }
        agent::Request::Exec {
            version: OLDEST,
            command,
        }
    }

    /// A path of the guest's /run on this host.
    fn in_guest(&self, path: &str) -> String {
        let name = path.strip_prefix("/run/").expect("a file in /run");
        let guest = self.folder.join("guest");
        guest.join(name).to_str().unwrap().to_owned()
    }
}

fn respond(client: &mut UnixStream, status: u16, value: &serde_json::Value) -> io::Result<()> {
    let body = value.to_string();
    write!(
        client,
        "HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
}

fn vm(name: &str, id: &str) -> serde_json::Value {
    let state = if name == "off" { "exited" } else { "running" };
    json!({
        "id": id, "name": name, "state": state, "image": "base", "kernel": "base",
        "cpus": 1, "memory_mib": 256, "command": null, "disks": [],
        "created": 100, "started": 100, "ended": null, "pid": 42, "cid": 3,
        "exit": null, "error": null, "remove": false
    })
}
