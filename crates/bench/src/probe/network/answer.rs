//! From a start to a byte from a TCP server in the guest.

use super::run_all;
use crate::network::{IMAGE, MEMORY_MIB, SERVER};
use crate::plan::{HostCommands, Sample, Start};
use crate::probe::marks::Marks;
use crate::probe::node::{JIFFY, jiffy, output};
use crate::probe::{Running, command, now_ns, timeline_spans, wait_for, wait_until_idle};
use crate::traffic::{ANSWER, ANSWER_PORT, GUEST};
use crate::verbs::has_golden_of;
use anyhow::{Context, Result, bail, ensure};
use std::fs;
use std::io::Read;
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

/// The host's port that leads to the VM's.
const PUBLISHED: u16 = 17_000;
/// Time limit of an answer.
const TIMEOUT: Duration = Duration::from_secs(30);
/// The machine's.
const BUSYBOX: &str = "/bin/busybox";
/// The image's root file system.
const ROOT: &str = "/bench/answering-root";

/// Measures one start.
///
/// # Errors
///
/// If the image can't be imported, or the VM can't be started or does not answer.
pub fn to_answer(start: Start, run: u32) -> Result<Sample> {
    if run == 0 {
        import_image()?;
    }
    let vm = format!("answers-{start:?}-{run}").to_lowercase();
    let found = match start {
        Start::Cold => ready_when_it_says(&vm, &["--cold"]),
        Start::Golden => {
            if run > 0 {
                wait_for(&["/bin/sh".into(), "-c".into(), has_golden_of(MEMORY_MIB)])?;
                wait_until_idle()?;
            }
            ready_when_it_says(&vm, &[])
        }
        Start::Asleep => woken(&vm),
    };
    let _ = output(&["rm", "--force", &vm]);
    found
}

/// Imports an image with the server, and with the programs that nearly every image has, unless the
/// node has it.
///
/// # Errors
///
/// If a program can't be copied, or `jiffy` fails.
pub fn import_image() -> Result<()> {
    if output(&["image", "inspect", IMAGE])?.status.success() {
        return Ok(());
    }
    for folder in ["bin", "dev", "etc", "proc", "sys", "tmp"] {
        fs::create_dir_all(Path::new(ROOT).join(folder))?;
    }
    for (program, name) in [(SERVER, "bin/answer"), (BUSYBOX, "bin/busybox")] {
        fs::copy(program, Path::new(ROOT).join(name)).context(program)?;
    }
    for applet in ["sh", "true"] {
        std::os::unix::fs::symlink("busybox", Path::new(ROOT).join("bin").join(applet))?;
    }
    jiffy(&["image", "import", IMAGE, ROOT])?;
    Ok(())
}

fn run_words<'a>(vm: &'a str, published: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    let mut words = vec!["run", "--name", vm, "--network", "default"];
    words.extend(["--memory", MEMORY_MIB, "--publish", published]);
    words.extend(more);
    words.extend([IMAGE, "--", "/bin/answer"]);
    words
}

fn published() -> String {
    format!("{PUBLISHED}:{ANSWER_PORT}")
}

/// Measures from the start of `jiffy run` to the answer. The server writes to stdout when it
/// listens, so there are no attempts that fail.
fn ready_when_it_says(vm: &str, more: &[&str]) -> Result<Sample> {
    let published = published();
    let mut command = Command::new(JIFFY);
    command.args(run_words(vm, &published, more));
    command.stdin(Stdio::null());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let start = now_ns();
    let mut child = Running(command.spawn().context(JIFFY)?);
    let stdout = child.0.stdout.as_mut().context("stdout is piped")?;
    let mut said = [0; 2];
    if stdout.read(&mut said)? == 0 {
        let mut message = String::new();
        if let Some(stderr) = &mut child.0.stderr {
            stderr.take(4096).read_to_string(&mut message)?;
        }
        bail!("the server does not listen: {}", message.trim());
    }
    let listening = now_ns();
    ask(Ipv4Addr::LOCALHOST, PUBLISHED)?;
    let end = now_ns();
    drop(child);
    let timeline = [JIFFY, "timeline", vm, "--format", "json"].map(String::from);
    let mut spans = timeline_spans(&timeline)?;
    spans.insert("server listens".into(), listening - start);
    spans.insert("connection to answer".into(), end - listening);
    Ok(Sample {
        nanoseconds: end - start,
        spans,
        ..Sample::default()
    })
}

/// Measures from the connection's start to the answer of a VM that sleeps.
fn woken(vm: &str) -> Result<Sample> {
    let published = published();
    jiffy(&run_words(vm, &published, &["--detach"]))?;
    let until = now_ns() + TIMEOUT.as_nanos() as u64;
    while let Err(error) = ask(Ipv4Addr::LOCALHOST, PUBLISHED) {
        ensure!(now_ns() < until, "the server does not listen: {error:#}");
        std::thread::sleep(Duration::from_millis(10));
    }
    jiffy(&["hibernate", vm])?;
    wait_until_idle()?;
    let start = now_ns();
    ask(Ipv4Addr::LOCALHOST, PUBLISHED)?;
    let end = now_ns();
    let timeline = [JIFFY, "timeline", vm, "--format", "json"].map(String::from);
    Ok(Sample {
        nanoseconds: end - start,
        spans: timeline_spans(&timeline)?,
        ..Sample::default()
    })
}

/// Measures from the first command for the host's side to the answer of another VMM's guest.
///
/// # Errors
///
/// If a command fails, or the guest does not listen or answer.
pub fn peer_to_answer(host: &HostCommands, argv: &[String]) -> Result<Sample> {
    let mut command = command(argv)?;
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let start = now_ns();
    run_all(&host.make)?;
    let made = now_ns();
    let mut child = Running(command.spawn().with_context(|| argv.join(" "))?);
    Marks::of(&mut child)?.next(&mut child)?;
    let listening = now_ns();
    ask(GUEST, ANSWER_PORT)?;
    let end = now_ns();
    drop(child);
    run_all(&host.remove)?;
    let spans = [
        ("host's side", made - start),
        ("server listens", listening - start),
        ("connection to answer", end - listening),
    ];
    Ok(Sample {
        nanoseconds: end - start,
        spans: spans.map(|(name, ns)| (name.to_owned(), ns)).into(),
        ..Sample::default()
    })
}

/// Connects and reads the answer.
///
/// # Errors
///
/// If nothing answers within 30 s, or the answer is not [`ANSWER`].
pub fn ask(address: Ipv4Addr, port: u16) -> Result<()> {
    let mut stream = TcpStream::connect_timeout(&SocketAddr::from((address, port)), TIMEOUT)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    let mut byte = [0];
    stream.read_exact(&mut byte)?;
    ensure!(byte == [ANSWER], "another answer: {byte:?}");
    Ok(())
}
