//! The fixture: `jiffy` in the laboratory.

use jiffy_sys::mutex::{lock, unpoisoned};
use jiffy_testkit::{Lab, MOST_SHARED, Output, Run, slowest};
use serde_json::Value;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, Once};
use std::time::{Duration, Instant};

/// Time limit after which an operation counts as hanging. It says nothing about the expected speed,
/// because the host may be slow, busy or suspended.
pub const TIMEOUT: Duration = Duration::from_secs(300);

/// Time limit of a guest's start, seconds, for the daemon that a command starts.
const START_TIMEOUT: &str = "250";

/// Command that starts the Python of [`Jiffy::install_python`]; options follow.
pub const PYTHON: &str =
    "PYTHONHOME=/python /python/ld.so --library-path /python /python/python3 -S";

/// Whether a killed process still has open files, by its `status`. A zombie has ended, even if its
/// parent has not waited for it, unless other threads than its first are still to end.
pub const LIVES: &str = "grep -qE -e '^State:.[^ZX]' -e '^Threads:.([2-9]|..)'";

/// How long a VMM of that daemon waits for another pager, milliseconds.
const PAGER_TIMEOUT: &str = "60000";

/// `jiffy` in a machine, for one test at a time. When the test ends or fails, everything it left
/// behind is removed.
pub struct Jiffy {
    pub lab: &'static Lab,
    turn: Turn,
    /// Environment variables of this test's daemon, instead of those that all tests' daemons have.
    settings: &'static [(&'static str, &'static str)],
}

/// Machines that are not in use.
static FREE: Mutex<[bool; MOST_SHARED]> = Mutex::new([true; MOST_SHARED]);
static FREED: Condvar = Condvar::new();
/// Shared machines that were cleaned up after their last test.
static CLEAN: [AtomicBool; MOST_SHARED] = [const { AtomicBool::new(false) }; MOST_SHARED];

/// The right to use one core's machine until this is dropped: the shared one, or one that the test
/// boots.
pub struct Turn {
    number: usize,
    begin: Instant,
    /// The shared machine, if it is used, and its CPU time at the beginning.
    used: Option<(&'static Lab, Duration)>,
}

impl Drop for Turn {
    fn drop(&mut self) {
        let used = self.used.and_then(|(lab, before)| {
            let now = lab.cpu_time().ok()?;
            Some(now.saturating_sub(before))
        });
        slowest::note(self.begin.elapsed(), used);
        lock(&FREE)[self.number] = true;
        FREED.notify_one();
    }
}

/// Waits for a machine; there is at most one per core.
pub fn turn() -> Turn {
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
    let mut free = lock(&FREE);
    loop {
        if let Some(number) = free.iter().take(cores).position(|free| *free) {
            free[number] = false;
            return Turn {
                number,
                begin: Instant::now(),
                used: None,
            };
        }
        free = unpoisoned(FREED.wait(free));
    }
}

/// Waits for a shared machine and cleans it up if needed. `settings` are environment variables of a
/// daemon for this test alone.
pub fn jiffy_with(settings: &'static [(&'static str, &'static str)]) -> Jiffy {
    let mut jiffy = jiffy();
    jiffy.kill_all("jiffyd");
    jiffy.settings = settings;
    jiffy
}

/// Waits for a shared machine and cleans it up if needed.
pub fn jiffy() -> Jiffy {
    let mut turn = turn();
    let lab = Lab::shared_one(turn.number).unwrap_or_else(|error| panic!("{error:#}"));
    turn.begin = Instant::now();
    turn.used = lab.cpu_time().ok().map(|used| (lab, used));
    let jiffy = Jiffy {
        lab,
        turn,
        settings: &[],
    };
    if !CLEAN[jiffy.machine()].swap(false, Ordering::Relaxed) {
        jiffy.remove_all();
    }
    jiffy.warm_up();
    jiffy
}

impl Jiffy {
    /// `jiffy` with these arguments, not started yet.
    pub fn command(&self, arguments: &[&str]) -> Run<'static> {
        let argv = std::iter::once("/bin/jiffy").chain(arguments.iter().copied());
        self.program(argv)
    }

    /// A program that is `jiffy` or runs it. The first one may start the daemon, which inherits
    /// these limits.
    fn program<'a>(&self, argv: impl IntoIterator<Item = &'a str>) -> Run<'static> {
        let usual = [
            ("JIFFY_MACHINE", "never"),
            // Only one node can have a machine's network, and the tests run several nodes.
            ("JIFFY_VM_NETWORK", "off"),
            ("JIFFY_START_TIMEOUT", START_TIMEOUT),
            ("JIFFY_PAGER_PATIENCE_MS", PAGER_TIMEOUT),
        ];
        let own = |name: &str| self.settings.iter().any(|(one, _)| *one == name);
        let usual = usual.iter().filter(|(name, _)| !own(name));
        let command = self.lab.command(argv);
        usual
            .chain(self.settings)
            .fold(command, |command, (name, value)| command.env(name, value))
    }

    /// The number of the shared machine.
    pub fn machine(&self) -> usize {
        self.turn.number
    }

    /// Runs `jiffy` to its end.
    pub fn run(&self, arguments: &[&str]) -> Output {
        self.command(arguments)
            .output()
            .unwrap_or_else(|error| panic!("jiffy {}: {error:#}", arguments.join(" ")))
    }

    /// Runs `jiffy`, which must succeed; returns its stdout.
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

    /// Runs `jiffy`, which must fail with `code` and exactly one sentence, with or without a hint;
    /// returns the sentence.
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

    /// Runs `jiffy` and parses its JSON output.
    pub fn json(&self, arguments: &[&str]) -> Value {
        let text = self.ok(arguments);
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error} in {text}"))
    }

    /// Runs a shell script in the machine, which must succeed; returns its stdout.
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

    /// Process ids of programs of this name in the machine, without VMMs of standbys and spares.
    pub fn pids(&self, program: &str) -> Vec<i32> {
        // `read` drops the zeros between arguments and starts no process.
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

    /// Ids of the standbys. Call it after looking for their files: a standby that is taken
    /// meanwhile is then reported as a VM.
    pub fn standbys(&self) -> Vec<String> {
        let version = self.json(&["version", "--format", "json"]);
        let ids = version["node"]["standbys"].as_array();
        let ids = ids.into_iter().flatten().filter_map(Value::as_str);
        ids.map(str::to_owned).collect()
    }

    /// The output of `inspect` for one VM.
    pub fn inspect(&self, vm: &str) -> Value {
        match self.json(&["inspect", vm]) {
            Value::Array(list) => list.into_iter().next().expect("one VM"),
            one => one,
        }
    }

    /// Copies the witness into the machine, to `/tests/witness`.
    pub fn push_witness(&self) {
        static PUSHED: [Once; MOST_SHARED] = [const { Once::new() }; MOST_SHARED];
        PUSHED[self.machine()].call_once(|| {
            let program = Path::new(env!("CARGO_BIN_EXE_jiffy-witness"));
            self.lab.push(program, "/tests/witness").expect("copied");
        });
    }

    /// Starts a VM that runs the witness with these arguments.
    pub fn witness(&self, name: &str, options: &[&str], arguments: &str) {
        self.push_witness();
        let script =
            format!("until [ -e /tmp/go ]; do sleep 0.1; done; exec /bin/witness {arguments}");
        let mut argv = vec!["run", "-d", "--name", name];
        argv.extend(options);
        argv.extend(["--", "sh", "-c", &script]);
        self.ok(&argv);
        self.ok(&["cp", "/tests/witness", &format!("{name}:/bin/witness")]);
        self.ok(&["exec", name, "touch", "/tmp/go"]);
    }

    /// Ends the witnesses in a VM whose command is one; the VM then powers off.
    pub fn kill_witnesses(&self, vm: &str) {
        let killed = self.run(&["exec", vm, "killall", "witness"]);
        // The power-off may end `killall` as well, with status 143.
        let (code, said) = (killed.code(), killed.error_text());
        assert!([0, 143].contains(&code), "{vm}: {code} {said}");
    }

    /// Copies this host's Python into a VM; [`PYTHON`] starts it.
    pub fn install_python(&self, vm: &str) {
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

    /// The count of `witness count /tmp/n`. Asserts that its clock never went backwards.
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

    /// Waits until a VM has counted beyond `count`.
    pub fn wait_for_count_above(&self, vm: &str, count: u64) {
        self.eventually(&format!("{vm} counts"), || self.counted(vm) > count);
    }

    /// Waits until a condition holds.
    pub fn eventually(&self, what: &str, mut holds: impl FnMut() -> bool) {
        let deadline = Instant::now() + TIMEOUT;
        while !holds() {
            assert!(Instant::now() < deadline, "{what}: not within {TIMEOUT:?}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Waits until only the traces `before` are left; panics with the others.
    pub fn assert_nothing_left(&self, before: &Traces, what: &str) {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            let now = self.traces();
            let fresh: Vec<_> = now
                .files
                .iter()
                .filter(|file| !before.files.contains(file))
                .collect();
            let no_more = fresh.is_empty()
                && now.vmms <= before.vmms
                && now.sockets.len() <= before.sockets.len()
                && now.mounts == before.mounts;
            if no_more {
                return;
            }
            assert!(
                Instant::now() < deadline,
                "{what}: left behind: {fresh:?}; VMMs {} and {}, sockets {:?} and {:?}, mounts {:?} and {:?}",
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

    /// Makes the golden snapshot of plain runs, unless there is one: the node's background work
    /// must not disturb a test.
    pub fn warm_up(&self) {
        let is_there = || self.ok(&["snapshot", "ls", "--all"]).contains("golden-");
        if is_there() {
            return;
        }
        // After a prune the node also retries what an earlier test has spoilt.
        self.ok(&["snapshot", "prune"]);
        self.ok(&["run", "--rm", "--", "true"]);
        self.eventually("a golden snapshot", is_there);
    }

    /// Kills every process of that name and waits until they have ended.
    pub fn kill_all(&self, program: &str) {
        self.kill(&format!("$(pidof {program})"));
    }

    /// Kills these processes, words of a shell, and waits until they have ended.
    pub fn kill(&self, pids: &str) {
        self.sh(&format!(
            "pids={pids}; kill -9 $pids 2>/dev/null; for pid in $pids; do \
             while {LIVES} /proc/$pid/status 2>/dev/null; do sleep 0.01; done; done; true"
        ));
    }

    /// Removes every VM and every snapshot of the user.
    pub fn remove_all(&self) {
        let script = "ids=$(/bin/jiffy ps -aq) && [ -z \"$ids\" ] || /bin/jiffy rm -f $ids; \
             names=$(/bin/jiffy snapshot ls | awk 'NR > 1 { print $1 }'); \
             [ -z \"$names\" ] || /bin/jiffy snapshot rm $names; true";
        if let Err(error) = self.program(["/bin/sh", "-c", script]).output() {
            eprintln!("removing what a test left behind: {error:#}");
        }
    }

    /// [`traces`](Jiffy::traces) once the VMs of earlier commands and of the node itself are gone.
    /// A command is answered before its VM has ended.
    pub fn settled_traces(&self) -> Traces {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            // This also starts a daemon, which ends standbys of one that was killed.
            let vms = self.ok(&["ps", "-aq"]);
            let traces = self.traces();
            if traces.vmms == 0 && traces.sockets.is_empty() && vms.is_empty() {
                return traces;
            }
            assert!(
                Instant::now() < deadline,
                "VMs are left after {TIMEOUT:?}: {traces:?} {vms} {}",
                self.sh("tail -n 40 /run/jiffy/jiffyd.log; ps -o pid,ppid,args | grep jiffy")
            );
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Ends a daemon with settings of its own, and removes what only such a daemon has: golden
    /// snapshots of its kinds of VMs, links and rules.
    fn end_own_daemon(&self) {
        let script = "/bin/jiffy snapshot prune >/dev/null; killall -TERM jiffyd; \
             while pidof jiffyd >/dev/null; do sleep 0.05; done; \
             /lib/jiffy/jiffyd --remove-network";
        match self.program(["/bin/sh", "-c", script]).output() {
            Ok(output) if output.code() == 0 => {}
            Ok(output) => eprintln!("ending a test's daemon: {}", output.error_text()),
            Err(error) => eprintln!("ending a test's daemon: {error:#}"),
        }
    }

    /// State that must not grow: see [`Traces`].
    pub fn traces(&self) -> Traces {
        let lines = |script: &str| -> Vec<String> {
            let mut lines: Vec<String> = self.sh(script).lines().map(String::from).collect();
            lines.sort();
            lines
        };
        let vmms = self.pids("jiffy-vmm").len();
        // The node makes and removes golden snapshots and spares as needed; unfinished ones and the
        // VMs that they are made of must not stay.
        let mut files = lines(
            "find /run/jiffy /var/lib/jiffy/vms /var/lib/jiffy/snapshots \
             /var/lib/jiffy/golden /tmp -mindepth 1 2>/dev/null | \
             grep -v -e '\\.log$' -e '/tests' -e '/pager.sock' -e '/golden/[0-9a-f]' \
                  -e '/spares/[0-9a-f]*$' || true",
        );
        let mut sockets = lines("awk '$NF ~ \"/run/jiffy/vms\" { print $NF }' /proc/net/unix");
        let standbys = self.standbys();
        for list in [&mut files, &mut sockets] {
            list.retain(|line| standbys.iter().all(|id| !line.contains(id)));
        }
        Traces {
            vmms,
            files,
            sockets,
            mounts: lines("cut -d' ' -f2 /proc/mounts"),
        }
    }
}

impl Drop for Jiffy {
    fn drop(&mut self) {
        self.remove_all();
        if !self.settings.is_empty() {
            self.end_own_daemon();
        }
        CLEAN[self.machine()].store(!std::thread::panicking(), Ordering::Relaxed);
    }
}

/// State that ended VMs must not leave behind.
#[derive(Debug)]
pub struct Traces {
    pub vmms: usize,
    pub files: Vec<String>,
    /// The name of each socket in a VM's run folder: of those that listen, and once more for each
    /// connection.
    pub sockets: Vec<String>,
    pub mounts: Vec<String>,
}
