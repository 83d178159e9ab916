//! A registry with a password, as a user of `jiffy` sees it: messages and exit statuses. Runs on
//! the host, because it needs no VM.

use jiffy_registry::testing::{LocalRegistry, PASSWORD, RegistryOptions, USER};
use std::fs;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// Longest wait for the daemon to listen.
const TIMEOUT: Duration = Duration::from_secs(60);

/// A node whose user has not logged in, and a registry with a self-signed certificate.
struct Stage {
    registry: LocalRegistry,
    folder: tempfile::TempDir,
    daemon: Child,
}

impl Stage {
    fn new() -> Stage {
        let registry = LocalRegistry::start(&RegistryOptions {
            password: true,
            tls: true,
        })
        .expect("a registry");
        let folder = tempfile::tempdir().expect("a folder");
        let mut daemon = command_in(&folder, "lib/jiffy/jiffyd")
            .stderr(Stdio::null())
            .spawn()
            .expect("jiffyd starts (make build)");
        let until = Instant::now() + TIMEOUT;
        while UnixStream::connect(folder.path().join("run/jiffyd.sock")).is_err() {
            assert!(daemon.try_wait().expect("a child").is_none());
            assert!(Instant::now() < until, "jiffyd does not listen");
            std::thread::sleep(Duration::from_millis(20));
        }
        Stage {
            registry,
            folder,
            daemon,
        }
    }

    fn name(&self, tag: &str) -> String {
        format!("{}/team/mine:{tag}", self.registry.host())
    }

    fn authority(&self) -> String {
        self.registry.certificate().display().to_string()
    }

    fn jiffy(&self, words: &[&str], input: &str) -> Output {
        let mut child = command_in(&self.folder, "bin/jiffy")
            .args(words)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("jiffy starts");
        let mut stdin = child.stdin.take().expect("it is piped");
        // The command may exit without reading its input.
        let _ = stdin.write_all(input.as_bytes());
        drop(stdin);
        child.wait_with_output().expect("jiffy ends")
    }

    fn ok(&self, words: &[&str]) -> String {
        let output = self.jiffy(words, "");
        assert!(output.status.success(), "{words:?}: {output:?}");
        String::from_utf8_lossy(&output.stdout).trim_end().into()
    }

    /// Runs `jiffy`, which must fail; returns the lines of its message.
    fn refuses(&self, words: &[&str]) -> Vec<String> {
        let output = self.jiffy(words, "");
        assert_eq!(output.status.code(), Some(125), "{words:?}: {output:?}");
        assert!(output.stdout.is_empty(), "{output:?}");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        // The message must not contain any password.
        assert!(
            !said.contains("sesame") && !said.contains("barley"),
            "{said}"
        );
        said.lines().map(str::to_owned).collect()
    }

    /// Writes the file that `docker login` writes.
    fn log_in(&self, password: &str) {
        use base64::Engine as _;
        let auth = base64::engine::general_purpose::STANDARD.encode(format!("{USER}:{password}"));
        let host = self.registry.host();
        let config = format!(r#"{{"auths":{{"{host}":{{"auth":"{auth}"}}}}}}"#);
        fs::write(self.folder.path().join("config.json"), config).expect("written");
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        let _ = self.daemon.kill();
        let _ = self.daemon.wait();
    }
}

/// A program of the installation, with the test's folders.
fn command_in(folder: &tempfile::TempDir, program: &str) -> Command {
    let path: PathBuf = jiffy_testkit::dist().join(program);
    assert!(path.exists(), "{} is missing: make build", path.display());
    let mut command = Command::new(path);
    command
        .env("JIFFY_MACHINE", "never")
        .env("JIFFY_VM_NETWORK", "off")
        .env("JIFFY_DATA", folder.path().join("data"))
        .env("JIFFY_RUN", folder.path().join("run"))
        .env("DOCKER_CONFIG", folder.path())
        .env("HOME", folder.path())
        .stdin(Stdio::null());
    for others in ["REGISTRY_AUTH_FILE", "XDG_RUNTIME_DIR", "JIFFY_REGISTRY"] {
        command.env_remove(others);
    }
    command
}

#[test]
fn only_valid_credentials_reach_a_private_registry() {
    let stage = Stage::new();
    let root = stage.folder.path().join("root");
    fs::create_dir_all(root.join("etc")).expect("a folder");
    fs::write(root.join("etc/name"), "mine").expect("written");
    stage.ok(&["image", "import", "mine", &root.display().to_string()]);
    let (name, ca) = (stage.name("1"), stage.authority());
    let trusts = ["--ca", &ca];
    let right = format!("{USER}:{PASSWORD}");
    let host = stage.registry.host();
    let login = "  hint: Log in with `docker login`, or give --creds USER:PASSWORD";
    let nobody = "it requires credentials, or the repository does not exist";
    let wrong = "the credentials are not accepted, or do not permit this";
    let refused = |words: &[&str], why: &str, hint: &str| {
        let said = stage.refuses(words);
        let [sentence, shown] = &said[..] else {
            panic!("{words:?}: a sentence and a hint: {said:?}");
        };
        assert!(sentence.starts_with("jiffy: "), "{sentence}");
        assert!(
            sentence.contains(host) && sentence.contains(why),
            "{sentence}"
        );
        assert_eq!(shown, hint, "{words:?}");
    };

    // Pushes.
    let push = ["push", "mine", &name];
    let bad = ["--creds", "ali:open barley"];
    refused(&[&push[..], &trusts].concat(), nobody, login);
    refused(&[&push[..], &trusts, &bad].concat(), wrong, login);
    let by_flags = ["--creds", &right];
    let pushed = stage.ok(&[&push[..], &trusts, &by_flags].concat());
    assert!(pushed.starts_with("sha256:"), "{pushed}");

    // Pulls, and runs of an image that is not stored here.
    let pull = ["pull", &name];
    refused(&[&pull[..], &trusts].concat(), nobody, login);
    refused(&[&pull[..], &trusts, &bad].concat(), wrong, login);
    let authority = "  hint: Give the file of the authority that signed the registry's \
                     certificate with --ca FILE";
    for words in [
        &["pull", &name, "--creds", &right][..],
        &["run", "--rm", &name],
    ] {
        refused(words, "invalid peer certificate: UnknownIssuer", authority);
    }
    // Errors in flags are reported before any request.
    let said = stage.refuses(&[&pull[..], &["--creds", USER]].concat());
    assert_eq!(said[0], "jiffy: --creds has no password");
    let other = stage.folder.path().join("root/etc/name");
    let other = other.display().to_string();
    let said = stage.refuses(&[&pull[..], &["--ca", &other]].concat());
    assert_eq!(said, [format!("jiffy: {other} is not a PEM file")]);
    let gone = format!("{other}.pem");
    let said = stage.refuses(&[&pull[..], &["--ca", &gone]].concat());
    assert_eq!(
        said,
        [format!(
            "jiffy: {gone} can't be read: No such file or directory"
        )]
    );
    assert_eq!(stage.ok(&["image", "ls", "--quiet"]).lines().count(), 2);

    // By flags with the password on stdin; then from the file of `docker login`.
    let from_stdin = ["--creds", USER, "--password-stdin"];
    let output = stage.jiffy(&[&pull[..], &trusts, &from_stdin].concat(), "open sesame\n");
    assert!(output.status.success(), "{output:?}");
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim_end(), name);
    stage.ok(&["image", "rm", &name]);
    stage.log_in("open barley");
    refused(&[&pull[..], &trusts].concat(), wrong, login);
    stage.log_in(PASSWORD);
    assert_eq!(stage.ok(&[&pull[..], &trusts].concat()), name);
    // A missing image has another message.
    let missing = stage.refuses(&["pull", &stage.name("2"), "--ca", &ca]);
    assert!(missing[0].contains("is not in the registry"), "{missing:?}");
}
