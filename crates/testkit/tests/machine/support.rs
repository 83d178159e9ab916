//! The fixture: `jiffy` in the lab.

use jiffy_testkit::{Lab, MOST_SHARED, Output, Run, slowest};
use serde_json::Value;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, Once, PoisonError};
use std::time::{Duration, Instant};

/// What anything may take before it counts as hanging. Nothing is said by it
/// about how fast things are: this host may be slow, busy, or asleep.
pub const PATIENCE: Duration = Duration::from_secs(300);

/// Seconds a guest has to get ready, for the daemon that a command starts.
const START_TIMEOUT: &str = "250";

/// How to start the Python of [`Jiffy::give_python`]; its options follow.
pub const PYTHON: &str =
    "PYTHONHOME=/python /python/ld.so --library-path /python /python/python3 -S";

/// Milliseconds a VMM waits for another pager, for the same.
const PAGER_PATIENCE: &str = "60000";

/// `jiffy` in a machine, for one test at a time. What the test leaves
/// behind is removed when it ends, also when it fails.
pub struct Jiffy {
    pub lab: &'static Lab,
    turn: Turn,
}

/// Machines that no test uses now.
static FREE: Mutex<[bool; MOST_SHARED]> = Mutex::new([true; MOST_SHARED]);
static FREED: Condvar = Condvar::new();
/// Shared machines whose last test has removed what it left behind.
static CLEAN: [AtomicBool; MOST_SHARED] = [const { AtomicBool::new(false) }; MOST_SHARED];

/// A machine of one's own until this is dropped: one of those shared, or
/// another that one boots in its place.
pub struct Turn {
    number: usize,
    begin: Instant,
    /// The shared machine, if it is that one, and what it had used at the beginning.
    used: Option<(&'static Lab, Duration)>,
}

impl Drop for Turn {
    fn drop(&mut self) {
        let used = self.used.and_then(|(lab, before)| {
            let now = lab.cpu_time().ok()?;
            Some(now.saturating_sub(before))
        });
        slowest::note(self.begin.elapsed(), used);
        FREE.lock().unwrap_or_else(PoisonError::into_inner)[self.number] = true;
        FREED.notify_one();
    }
}

/// Waits for a machine; there is no more than one for each core.
pub fn turn() -> Turn {
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
    let mut free = FREE.lock().unwrap_or_else(PoisonError::into_inner);
    loop {
        if let Some(number) = free.iter().take(cores).position(|free| *free) {
            free[number] = false;
            return Turn {
                number,
                begin: Instant::now(),
                used: None,
            };
        }
        free = FREED.wait(free).unwrap_or_else(PoisonError::into_inner);
    }
}

/// Takes a turn.
pub fn jiffy() -> Jiffy {
    let mut turn = turn();
    let lab = Lab::shared_one(turn.number).unwrap_or_else(|error| panic!("{error:#}"));
    turn.begin = Instant::now();
    turn.used = lab.cpu_time().ok().map(|used| (lab, used));
    let jiffy = Jiffy { lab, turn };
    if !CLEAN[jiffy.machine()].swap(false, Ordering::Relaxed) {
        jiffy.remove_all();
    }
    jiffy.warm_up();
    jiffy
}

impl Jiffy {
    /// `jiffy` with these arguments, not yet started.
    pub fn command(&self, arguments: &[&str]) -> Run<'static> {
        let argv = std::iter::once("/bin/jiffy").chain(arguments.iter().copied());
        self.program(argv)
    }

    /// A program that is `jiffy`, or runs it: its first may start the daemon,
    /// which keeps these limits.
    fn program<'a>(&self, argv: impl IntoIterator<Item = &'a str>) -> Run<'static> {
        self.lab
            .command(argv)
            .env("JIFFY_MACHINE", "never")
            // One node has the network of a machine, and here there are many.
            .env("JIFFY_VM_NETWORK", "off")
            .env("JIFFY_START_TIMEOUT", START_TIMEOUT)
            .env("JIFFY_PAGER_PATIENCE_MS", PAGER_PATIENCE)
    }

    /// Which of the shared machines this is.
    pub fn machine(&self) -> usize {
        self.turn.number
    }

    /// Runs `jiffy` to its end.
    pub fn run(&self, arguments: &[&str]) -> Output {
        self.command(arguments)
            .output()
            .unwrap_or_else(|error| panic!("jiffy {}: {error:#}", arguments.join(" ")))
    }

    /// Runs `jiffy`, which must succeed; its stdout.
    pub fn ok(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        assert_eq!(
            output.code(),
            0,
            "jiffy {}\nstdout: {}\nstderr: {}",
            arguments.join(" "),
            output.text(),
            output.error_text()
        );
        output.text()
    }

    /// Runs `jiffy`, which must fail with `code` and exactly one sentence
    /// (and perhaps a hint); the sentence.
    pub fn refuses(&self, code: i32, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        let what = format!(
            "jiffy {}\nstdout: {}\nstderr: {}",
            arguments.join(" "),
            output.text(),
            output.error_text()
        );
        assert_eq!(output.code(), code, "{what}");
        let text = output.error_text();
        let sentences: Vec<_> = text
            .lines()
            .filter(|line| line.starts_with("jiffy: "))
            .collect();
        assert_eq!(sentences.len(), 1, "one sentence: {what}");
        assert!(
            text.lines()
                .all(|line| line.starts_with("jiffy: ") || line.starts_with("  hint: ")),
            "a sentence and a hint, nothing else: {what}"
        );
        assert!(!text.contains("panicked"), "{what}");
        text
    }

    /// Runs `jiffy` with a JSON answer.
    pub fn json(&self, arguments: &[&str]) -> Value {
        let text = self.ok(arguments);
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error} in {text}"))
    }

    /// A line of shell in the machine, which must succeed; its stdout.
    pub fn sh(&self, script: &str) -> String {
        let output = self
            .program(["/bin/sh", "-c", script])
            .output()
            .unwrap_or_else(|error| panic!("{script}: {error:#}"));
        assert_eq!(
            output.code(),
            0,
            "{script}: {} {}",
            output.text(),
            output.error_text()
        );
        output.text()
    }

    /// Process ids of programs of this name in the machine, but for VMMs that
    /// are restored ahead of a run, or wait to be told which VM they are.
    pub fn pids(&self, program: &str) -> Vec<i32> {
        // `read` leaves out the zeros between arguments, and starts no process.
        let found = self.lab.sh(&format!(
            "for pid in $(pidof {program}); do line=; read -r line < /proc/$pid/cmdline; \
             echo \"$pid $line\"; done 2>/dev/null; true"
        ));
        let text = found.expect("pidof runs").text();
        let standbys = self.standbys();
        text.lines()
            .filter(|line| !line.contains("/vms/------------/"))
            .filter(|line| standbys.iter().all(|id| !line.contains(id)))
            .filter_map(|line| line.split(' ').next()?.parse().ok())
            .collect()
    }

    /// The ids that VMs restored ahead will have. Ask after looking for what
    /// they have: one that is taken over meanwhile is a VM.
    pub fn standbys(&self) -> Vec<String> {
        let version = self.json(&["version", "--format", "json"]);
        let ids = version["node"]["standbys"].as_array();
        let ids = ids.into_iter().flatten().filter_map(Value::as_str);
        ids.map(str::to_owned).collect()
    }

    /// What `inspect` says of one VM.
    pub fn inspect(&self, vm: &str) -> Value {
        match self.json(&["inspect", vm]) {
            Value::Array(list) => list.into_iter().next().expect("one VM"),
            one => one,
        }
    }

    /// Starts a VM whose command is the witness, with these arguments.
    pub fn witness(&self, name: &str, options: &[&str], arguments: &str) {
        static PUSHED: [Once; MOST_SHARED] = [const { Once::new() }; MOST_SHARED];
        PUSHED[self.machine()].call_once(|| {
            let program = Path::new(env!("CARGO_BIN_EXE_jiffy-witness"));
            self.lab.push(program, "/tests/witness").expect("copied");
        });
        let script =
            format!("until [ -e /tmp/go ]; do sleep 0.1; done; exec /bin/witness {arguments}");
        let mut argv = vec!["run", "-d", "--name", name];
        argv.extend(options);
        argv.extend(["--", "sh", "-c", &script]);
        self.ok(&argv);
        self.ok(&["cp", "/tests/witness", &format!("{name}:/bin/witness")]);
        self.ok(&["exec", name, "touch", "/tmp/go"]);
    }

    /// Ends the witnesses in a VM whose command is one: it powers off.
    pub fn kill_witnesses(&self, vm: &str) {
        let killed = self.run(&["exec", vm, "killall", "witness"]);
        // What runs in it then is ended, too: 143 if that is still who killed them.
        let (code, said) = (killed.code(), killed.error_text());
        assert!([0, 143].contains(&code), "{vm}: {code} {said}");
    }

    /// Gives a VM this host's Python, to be started by [`PYTHON`].
    pub fn give_python(&self, vm: &str) {
        let script = r#"
            real=$(readlink -f /usr/bin/python3)
            encodings=lib/${real##*/}/encodings
            mkdir -p "$0/python/$encodings"
            cd "$0/python"
            cp "$real" python3
            cp /usr/"$encodings"/{__init__,aliases,utf_8}.py "$encodings"
            ldd "$real" | grep -o '/[^ ]*' | xargs cp -Lt .
            mv ld-linux* ld.so
            tar -C .. -cf ../python.tar python"#;
        let folder = tempfile::tempdir().expect("a folder");
        let packed = std::process::Command::new("bash")
            .args(["-e", "-c", script])
            .arg(folder.path())
            .output()
            .expect("bash");
        let said = String::from_utf8_lossy(&packed.stderr);
        assert!(packed.status.success(), "{said}");
        let tar = folder.path().join("python.tar");
        self.lab.push(&tar, "/tests/python.tar").expect("copied");
        self.ok(&["cp", "/tests/python.tar", &format!("{vm}:/tmp/python.tar")]);
        let unpack = "tar -C / -xf /tmp/python.tar && rm /tmp/python.tar";
        self.ok(&["exec", vm, "sh", "-c", unpack]);
    }

    /// How far `witness count /tmp/n` has counted. Its clock must be in order.
    pub fn counted(&self, vm: &str) -> u64 {
        let text = self.ok(&[
            "exec",
            vm,
            "sh",
            "-c",
            "cat /tmp/n /tmp/n.bad 2>/dev/null; true",
        ]);
        match text.as_str() {
            "" => 0,
            text => text.parse().unwrap_or_else(|_| panic!("{vm}: {text}")),
        }
    }

    /// Waits until a VM has counted further than that.
    pub fn counts_beyond(&self, vm: &str, count: u64) {
        self.eventually(&format!("{vm} counts"), || self.counted(vm) > count);
    }

    /// Waits until something holds.
    pub fn eventually(&self, what: &str, mut holds: impl FnMut() -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !holds() {
            assert!(Instant::now() < deadline, "{what}: not within {PATIENCE:?}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Waits until no more is there than before; says what is.
    pub fn leaves_nothing(&self, before: &Traces, what: &str) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let now = self.traces();
            let fresh: Vec<_> = now
                .files
                .iter()
                .filter(|file| !before.files.contains(file))
                .collect();
            let no_more = fresh.is_empty()
                && now.vmms <= before.vmms
                && now.sockets <= before.sockets
                && now.mounts == before.mounts;
            if no_more {
                return;
            }
            assert!(
                Instant::now() < deadline,
                "{what}: left behind: {fresh:?}; VMMs {} and {}, sockets {} and {}, mounts {:?} and {:?}",
                before.vmms,
                now.vmms,
                before.sockets,
                now.sockets,
                before.mounts,
                now.mounts
            );
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// Has the golden snapshot made that plain runs start from, unless there
    /// is one: what a node makes in the background must not come into a test's
    /// way.
    pub fn warm_up(&self) {
        let is_there = || self.ok(&["snapshot", "ls", "--all"]).contains("golden-");
        if is_there() {
            return;
        }
        // Also what an earlier test has spoilt is tried again.
        self.ok(&["snapshot", "prune"]);
        self.ok(&["run", "--rm", "--", "true"]);
        self.eventually("a golden snapshot", is_there);
    }

    /// Kills every program of that name, and waits until they are no more.
    pub fn kill_all(&self, program: &str) {
        // A zombie has ended, whether its parent has heard of it or not.
        self.sh(&format!(
            "pids=$(pidof {program}) || exit 0; kill -9 $pids 2>/dev/null; \
             for pid in $pids; do \
             while grep -q '^State:.[^ZX]' /proc/$pid/status 2>/dev/null; do sleep 0.01; done; \
             done; true"
        ));
    }

    /// Removes every VM, and every snapshot that a user made.
    pub fn remove_all(&self) {
        let script = "ids=$(/bin/jiffy ps -aq) && [ -z \"$ids\" ] || /bin/jiffy rm -f $ids; \
             names=$(/bin/jiffy snapshot ls | awk 'NR > 1 { print $1 }'); \
             [ -z \"$names\" ] || /bin/jiffy snapshot rm $names; true";
        if let Err(error) = self.program(["/bin/sh", "-c", script]).output() {
            eprintln!("removing what a test left behind: {error:#}");
        }
    }

    /// [`traces`](Jiffy::traces) once the VMs of earlier commands are gone, and
    /// those that the node makes for itself: a command has its answer before
    /// its VM has ended.
    pub fn at_rest(&self) -> Traces {
        let mut traces = self.traces();
        self.eventually("the end of all VMs", || {
            traces = self.traces();
            traces.vmms == 0 && traces.sockets == 0 && self.ok(&["ps", "-aq"]).is_empty()
        });
        traces
    }

    /// What must not grow: see [`Traces`].
    pub fn traces(&self) -> Traces {
        let lines = |script: &str| -> Vec<String> {
            let mut lines: Vec<String> = self.sh(script).lines().map(String::from).collect();
            lines.sort();
            lines
        };
        let vmms = self.pids("jiffy-vmm").len();
        // Golden snapshots come and go as the node sees fit; half-made ones
        // and VMs that they are made of must not stay.
        let mut files = lines(
            "find /run/jiffy /var/lib/jiffy/vms /var/lib/jiffy/snapshots \
             /var/lib/jiffy/golden /tmp -mindepth 1 2>/dev/null | \
             grep -v -e '\\.log$' -e '/tests' -e '/pager.sock' -e '/golden/[0-9a-f]' || true",
        );
        let mut sockets = lines("grep /run/jiffy/vms /proc/net/unix || true");
        let standbys = self.standbys();
        for list in [&mut files, &mut sockets] {
            list.retain(|line| standbys.iter().all(|id| !line.contains(id)));
        }
        Traces {
            vmms,
            files,
            sockets: sockets.len(),
            mounts: lines("cut -d' ' -f2 /proc/mounts"),
        }
    }
}

impl Drop for Jiffy {
    fn drop(&mut self) {
        self.remove_all();
        CLEAN[self.machine()].store(!std::thread::panicking(), Ordering::Relaxed);
    }
}

/// What VMs that have ended must not leave behind.
#[derive(Debug)]
pub struct Traces {
    pub vmms: usize,
    pub files: Vec<String>,
    pub sockets: usize,
    pub mounts: Vec<String>,
}
