//! `jiffy-sched` on the host where this program runs, which has sched_ext: `jiffy-lab run-tests
//! --kernel sched` runs it in the machine. Each test loads the policy for the whole host, so they
//! take turns.

use jiffy_sys::priority::{AWAITED, lowered};
use jiffy_wire::sched::{Class, PolicyEvent, SetClass};
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// Time limit of a change of the scheduler, and of a daemon's start.
const LIMIT: Duration = Duration::from_secs(60);
/// Programs that compete for each processor.
const SPINNERS: usize = 8;
/// Turns of a shell's loop that stands for a launch.
const LAUNCH: u32 = 5000;

static TURN: Mutex<()> = Mutex::new(());

fn turn() -> MutexGuard<'static, ()> {
    TURN.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// `disabled`, `enabled`, or a state between them.
fn state() -> String {
    let state = fs::read_to_string("/sys/kernel/sched_ext/state");
    state.expect("a kernel with sched_ext").trim().into()
}

fn wait_for(wanted: &str) {
    let deadline = Instant::now() + LIMIT;
    while state() != wanted {
        assert!(Instant::now() < deadline, "sched_ext is {}", state());
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A process that ends with this value.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A `jiffy-sched` whose policy is loaded.
struct Policy {
    process: Killed,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Policy {
    fn load(arguments: &[&str]) -> Policy {
        let mut process = Command::new("/lib/jiffy/jiffy-sched")
            .args(["--policy", "/lib/jiffy/jiffy-sched.bpf.o"])
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("jiffy-sched");
        let input = process.stdin.take().expect("a pipe");
        let output = BufReader::new(process.stdout.take().expect("a pipe"));
        let mut policy = Policy {
            process: Killed(process),
            input,
            output,
        };
        assert_eq!(policy.said(), PolicyEvent::Loaded);
        wait_for("enabled");
        policy
    }

    fn said(&mut self) -> PolicyEvent {
        let mut line = String::new();
        self.output.read_line(&mut line).expect("a line");
        serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line:?}"))
    }

    fn tell(&mut self, pid: u32, class: Class) {
        let line = serde_json::to_string(&SetClass { pid, class }).expect("JSON");
        writeln!(self.input, "{line}").expect("jiffy-sched reads");
    }
}

fn spinner(nice: u8) -> Killed {
    let script = format!("renice -n {nice} -p $$ && while :; do :; done");
    let mut command = Command::new("sh");
    command.args(["-c", &script]).stdout(Stdio::null());
    Killed(command.spawn().expect("a spinner"))
}

fn spinners(nice: u8) -> Vec<Killed> {
    (0..SPINNERS).map(|_| spinner(nice)).collect()
}

/// How long so many turns of a loop take; `begun` gets the process before it works.
fn work(turns: u32, begun: impl FnOnce(u32)) -> Duration {
    let mut command = Command::new("sh");
    let script = format!("read go; i=0; while [ $i -lt {turns} ]; do i=$((i+1)); done");
    let mut child = command
        .args(["-c", &script])
        .stdin(Stdio::piped())
        .spawn()
        .expect("a shell");
    begun(child.id());
    // Its class is told, and it sleeps.
    std::thread::sleep(Duration::from_millis(300));
    let begin = Instant::now();
    drop(child.stdin.take());
    assert!(child.wait().expect("a child").code().is_some());
    begin.elapsed()
}

#[test]
#[ignore = "needs sched_ext here"]
fn a_launch_is_not_delayed_by_programs_that_compete() {
    let _turn = turn();
    assert_eq!(state(), "disabled");
    let alone = work(LAUNCH, |_| {});
    let spinners = spinners(0);
    let shared = work(LAUNCH, |_| {});
    let mut policy = Policy::load(&[]);
    let untold = work(LAUNCH, |_| {});
    let launched = work(LAUNCH, |pid| policy.tell(pid, Class::Launch));
    drop(spinners);
    println!(
        "alone {alone:?}, among {SPINNERS} spinners {shared:?}; by jiffy-sched {untold:?}, as a launch {launched:?}"
    );
    assert!(launched * 2 < shared, "{launched:?} of {shared:?}");
    assert!(launched * 2 < untold, "{launched:?} of {untold:?}");
}

#[test]
#[ignore = "needs sched_ext here"]
fn a_launch_that_takes_long_is_demoted_and_others_get_turns_meanwhile() {
    let _turn = turn();
    let mut policy = Policy::load(&["--budget", "100"]);
    let spinners = spinners(0);
    let demoted = work(4 * LAUNCH, |pid| policy.tell(pid, Class::Launch));
    drop(policy);
    wait_for("disabled");
    let mut policy = Policy::load(&["--budget", "100000"]);
    let launched = work(4 * LAUNCH, |pid| policy.tell(pid, Class::Launch));
    println!("with a budget {demoted:?}, without {launched:?}");
    assert!(launched * 2 < demoted, "{launched:?} of {demoted:?}");
    // A launch that never ends.
    let endless = spinner(0);
    policy.tell(endless.0.id(), Class::Launch);
    std::thread::sleep(Duration::from_millis(500));
    let begin: u64 = spinners.iter().map(ticks).sum();
    std::thread::sleep(Duration::from_secs(2));
    let end: u64 = spinners.iter().map(ticks).sum();
    assert!(end > begin, "the spinners got no turn in 2 s");
}

/// CPU time of a process, in hundredths of a second.
fn ticks(process: &Killed) -> u64 {
    let stat = fs::read_to_string(format!("/proc/{}/stat", process.0.id())).unwrap_or_default();
    let fields = stat.rsplit(')').next().unwrap_or_default();
    let times = fields.split_whitespace().skip(11).take(2);
    times.filter_map(|field| field.parse::<u64>().ok()).sum()
}

#[test]
#[ignore = "needs sched_ext here"]
fn the_kernel_schedules_again_when_the_policy_is_killed_or_closed() {
    let _turn = turn();
    let mut policy = Policy::load(&[]);
    let ops = fs::read_to_string("/sys/kernel/sched_ext/root/ops").expect("a policy");
    assert_eq!(ops.trim(), "jiffy");
    policy.process.0.kill().expect("a process");
    wait_for("disabled");

    let Policy {
        mut process, input, ..
    } = Policy::load(&[]);
    drop(input);
    wait_for("disabled");
    assert!(process.0.wait().expect("a child").success());

    let mut policy = Policy::load(&[]);
    writeln!(policy.input, "not a message").expect("a pipe");
    assert!(
        matches!(policy.said(), PolicyEvent::Ended { reason } if reason.contains("not a message"))
    );
    wait_for("disabled");
}

#[test]
#[ignore = "needs sched_ext here"]
fn the_kernels_watchdog_ends_a_policy_that_starves_a_task() {
    let _turn = turn();
    let busy = spinners(0);
    let mut policy = Policy::load(&["--starve-background"]);
    let starved = spinners(19);
    let PolicyEvent::Ended { reason } = policy.said() else {
        panic!("it was loaded twice");
    };
    assert!(reason.contains("did not run for 5 s"), "{reason}");
    wait_for("disabled");
    assert!(!policy.process.0.wait().expect("a child").success());
    drop((busy, starved));
}

/// A daemon with a policy, and its folders.
fn daemon(folder: &Path) -> Killed {
    let daemon = Command::new("/lib/jiffy/jiffyd")
        .arg("--data")
        .arg(folder.join("data"))
        .arg("--run")
        .arg(folder.join("run"))
        .args(["--scheduler", "sched-ext", "--vm-network", "off"])
        .args(["--start-timeout", "600"])
        // Software emulation is slow.
        .env("JIFFY_LAUNCH_BUDGET", "60000")
        .stdin(Stdio::null())
        .spawn()
        .expect("jiffyd");
    let daemon = Killed(daemon);
    let deadline = Instant::now() + LIMIT;
    while UnixStream::connect(folder.join("run/jiffyd.sock")).is_err() {
        assert!(Instant::now() < deadline, "jiffyd does not listen");
        std::thread::sleep(Duration::from_millis(20));
    }
    wait_for("enabled");
    daemon
}

fn jiffy(folder: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new("/bin/jiffy");
    command
        .args(arguments)
        .env("JIFFY_MACHINE", "never")
        .env("JIFFY_DATA", folder.join("data"))
        .env("JIFFY_RUN", folder.join("run"))
        .stdin(Stdio::null());
    command
}

/// Runs a VM to its end among programs that compete.
fn run(folder: &Path) -> Duration {
    let begin = Instant::now();
    let arguments = [
        "run", "--rm", "--cold", "--name", "box", "--", "echo", "hello",
    ];
    let output = jiffy(folder, &arguments).output().expect("jiffy");
    assert_eq!(
        String::from_utf8_lossy(&output.stdout),
        "hello\n",
        "{output:?}"
    );
    begin.elapsed()
}

#[test]
#[ignore = "needs sched_ext here"]
fn vms_start_sooner_and_a_daemon_that_is_killed_leaves_no_policy() {
    let _turn = turn();
    let folder = tempfile::tempdir().expect("a folder");
    let mut node = daemon(folder.path());
    // The first run reads the files.
    let alone = run(folder.path());
    let spinners = spinners(0);
    let told = run(folder.path());
    node.0.kill().expect("a process");
    wait_for("disabled");
    drop(node);

    let node = daemon(folder.path());
    let policy = fs::read_dir("/proc").expect("/proc").flatten();
    let policy = policy.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let is_policy = |pid: &i32| {
        let name = fs::read_to_string(format!("/proc/{pid}/comm"));
        name.is_ok_and(|name| name.trim() == "jiffy-sched")
    };
    let pid = policy.into_iter().find(is_policy).expect("jiffy-sched");
    let pid = rustix::process::Pid::from_raw(pid).expect("a pid");
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).expect("a process");
    wait_for("disabled");
    // The daemon goes on without it.
    let untold = run(folder.path());
    println!(
        "a cold run alone {alone:?}; among {SPINNERS} spinners {told:?}, without the policy {untold:?}"
    );
    assert!(told * 2 < untold, "{told:?} of {untold:?}");
    drop((node, spinners));
}

#[test]
#[ignore = "needs sched_ext here"]
fn an_urgent_thread_with_a_nice_value_waits_as_others_do() {
    let _turn = turn();
    let mut policy = Policy::load(&[]);
    policy.tell(std::process::id(), Class::Urgent);
    let _spinners = spinners(0);
    std::thread::sleep(Duration::from_millis(300));
    // How late it runs after sleeping, in all.
    let lateness = |nice| -> Duration {
        let sleep = Duration::from_millis(7);
        let late = |_| {
            let begin = Instant::now();
            std::thread::sleep(sleep);
            begin.elapsed().saturating_sub(sleep)
        };
        lowered(nice, || (0..30).map(late).sum())
    };
    let (urgent, lower) = (lateness(0), lateness(AWAITED));
    println!("30 sleeps are late by {urgent:?}, with a nice value by {lower:?}");
    assert!(urgent * 4 < lower, "{urgent:?} and {lower:?}");
}

#[test]
#[ignore = "needs sched_ext here"]
fn an_urgent_program_that_never_sleeps_has_the_share_of_others() {
    let _turn = turn();
    let mut policy = Policy::load(&[]);
    let spinners = spinners(0);
    let steady = work(LAUNCH, |_| {});
    let urgent = work(LAUNCH, |pid| policy.tell(pid, Class::Urgent));
    drop(spinners);
    println!("{urgent:?} as an urgent program, {steady:?} as a steady one");
    assert!(urgent * 2 > steady, "{urgent:?} and {steady:?}");
}

#[test]
#[ignore = "needs sched_ext here"]
fn a_recording_has_the_classes_of_what_ran() {
    let _turn = turn();
    let folder = tempfile::tempdir().expect("a folder");
    let tracing = folder.path().join("tracing");
    fs::create_dir(&tracing).expect("a folder");
    let flags = rustix::mount::MountFlags::empty();
    rustix::mount::mount("tracefs", &tracing, "tracefs", flags, None).expect("tracefs");
    let instances = || {
        fs::read_dir(tracing.join("instances"))
            .expect("tracefs")
            .count()
    };
    let node = daemon(folder.path());
    let (steady, background) = (spinner(0), spinner(19));
    let file = folder.path().join("recording");
    let output = file.to_str().expect("a path");
    let recording = jiffy(
        folder.path(),
        &["sched", "trace", "--seconds", "60", "-o", output],
    );
    let mut recording = Killed({ recording }.spawn().expect("jiffy"));
    let deadline = Instant::now() + LIMIT;
    while instances() == 0 {
        assert!(Instant::now() < deadline, "it does not begin");
        std::thread::sleep(Duration::from_millis(20));
    }
    run(folder.path());
    // Several times as long as a background task may wait for its turn.
    std::thread::sleep(Duration::from_millis(500));
    let pid = rustix::process::Pid::from_child(&recording.0);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).expect("a process");
    assert!(recording.0.wait().expect("a child").success());
    assert_eq!(instances(), 0);
    rustix::mount::unmount(&tracing, rustix::mount::UnmountFlags::DETACH).expect("a mount");

    let trace = fs::read(&file).expect("a recording");
    let trace: serde_json::Value = serde_json::from_slice(&trace).expect("trace events");
    assert_eq!(trace["otherData"]["scheduler"], "jiffy");
    let events = trace["traceEvents"].as_array().expect("events");
    let ran = |class: &str, is_it: &dyn Fn(&serde_json::Value) -> bool| {
        let mut runs = events.iter().filter(|event| event["cat"] == class);
        assert!(runs.any(is_it), "no such {class} run");
    };
    ran("launch", &|run| run["name"] == "box: vcpu 0");
    ran("urgent", &|run| run["name"] == "jiffyd");
    ran("steady", &|run| run["args"]["pid"] == steady.0.id());
    ran("background", &|run| run["args"]["pid"] == background.0.id());
    drop(node);
}
