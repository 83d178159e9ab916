//! Capture, restore and fork of `jiffy-vmm`, without a node in between.

use super::lazy::Pager;
use super::{Running, event_spans, kvm_counters, now_ns};
use crate::plan::{MARKER, Sample};
use anyhow::{Context, Result, bail};
use jiffy_sys::fds::recv_with_fds;
use jiffy_wire::timeline::names;
use jiffy_wire::vmm::{
    ControlRequest, ControlResponse, Extent, Restore, SavedMemory, Source, VmmConfig, VmmEvent,
};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const VMM: &str = "/lib/jiffy/jiffy-vmm";
/// A tmpfs that keeps files in huge pages, as the page cache of XFS does with
/// what was written in large pieces.
pub const SNAPSHOT: &str = "/bench/snapshot";
const STATE: &str = "/bench/snapshot/state";
pub const RAM: &str = "/bench/snapshot/ram.raw";
const CONFIG: &str = "/bench/restore.json";

/// A booted VM, and what was captured of it.
pub struct Stage {
    config: VmmConfig,
    parent: Running,
    prefault: Vec<Extent>,
    pager: Option<Pager>,
}

/// Where the RAM of a restore comes from.
pub enum Memory {
    /// The raw file.
    Mapped,
    /// A pager that listens there.
    Paged(PathBuf),
}

/// What a capture hands over.
struct Captured {
    pause_ns: u64,
    fds: Vec<OwnedFd>,
}

impl Stage {
    /// The stage of a case, made at its first run.
    pub fn of<'a>(stage: &'a mut Option<Stage>, config: &str) -> Result<&'a mut Stage> {
        if stage.is_none() {
            *stage = Some(Stage::new(config)?);
        }
        Ok(stage.as_mut().expect("just made"))
    }

    /// Boots, and captures into files for restores.
    fn new(config: &str) -> Result<Stage> {
        let config: VmmConfig = serde_json::from_slice(&fs::read(config)?)?;
        let mut parent = boot(&config)?;
        let captured = capture(&config, &mut parent)?;
        let [state, _, ram] = captured.fds.as_slice() else {
            bail!("{} descriptors were captured", captured.fds.len());
        };
        huge_tmpfs(SNAPSHOT)?;
        fs::write(STATE, contents(state)?)?;
        copy_sparse(&File::from(ram.try_clone()?), Path::new(RAM))?;
        // As the node does for golden snapshots: what the parent writes when
        // it goes on, its children will write too.
        let prefault = written(&config)?;
        Ok(Stage {
            config,
            parent,
            prefault,
            pager: None,
        })
    }
}

impl Stage {
    /// Nothing else may run while restores are measured.
    fn end_parent(&mut self) {
        let _ = self.parent.0.kill();
        let _ = self.parent.0.wait();
    }
}

/// One restore from the files.
pub fn restore(stage: &mut Stage) -> Result<Sample> {
    stage.end_parent();
    Ok(timed(stage, &Memory::Mapped)?.0)
}

/// One restore by a pager.
pub fn lazy(stage: &mut Stage, optimised: bool) -> Result<Sample> {
    stage.end_parent();
    if stage.pager.is_none() {
        stage.pager = Some(Pager::start(stage, optimised)?);
    }
    let pager = stage.pager.as_ref().expect("just started");
    pager.restore(stage)
}

/// A restore to the marker, and what it restored.
pub fn timed(stage: &Stage, memory: &Memory) -> Result<(Sample, Running)> {
    let mut config = stage.config.clone();
    config.control = None;
    config.restore = Some(Restore {
        state: Source::Path(STATE.into()),
        memory: match memory {
            Memory::Mapped => SavedMemory::Mapped {
                layers: vec![Source::Path(RAM.into())],
                layout: None,
            },
            Memory::Paged(socket) => SavedMemory::Paged {
                socket: socket.clone(),
            },
        },
        prefault: match memory {
            Memory::Mapped => stage.prefault.clone(),
            Memory::Paged(_) => Vec::new(),
        },
        generation: None,
        hold: false,
    });
    fs::write(CONFIG, serde_json::to_vec(&config)?)?;
    let (events, events_end) = rustix::pipe::pipe()?;
    let start = now_ns();
    let mut child = spawn(CONFIG, &events_end)?;
    drop(events_end);
    to_marker(&mut child)?;
    let end = now_ns();
    let sample = Sample {
        nanoseconds: end - start,
        counters: kvm_counters(child.0.id()),
        spans: spans_so_far(events, start)?,
    };
    Ok((sample, child))
}

/// What was told until now; who tells still lives.
fn spans_so_far(events: OwnedFd, start: u64) -> Result<BTreeMap<String, u64>> {
    let length = rustix::io::ioctl_fionread(&events)?;
    Ok(event_spans(File::from(events).take(length), start))
}

/// One fork of the running parent.
pub fn fork(stage: &mut Stage) -> Result<Sample> {
    let mut config = stage.config.clone();
    config.control = None;
    if let Some(vsock) = &mut config.vsock {
        vsock.path = "/tmp/bench-vsock-child.sock".into();
    }
    let (events, events_end) = rustix::pipe::pipe()?;
    let start = now_ns();
    let captured = capture(&stage.config, &mut stage.parent)?;
    let [state, layout, layers @ ..] = captured.fds.as_slice() else {
        bail!("{} descriptors were captured", captured.fds.len());
    };
    for fd in &captured.fds {
        rustix::io::fcntl_setfd(fd, rustix::io::FdFlags::empty())?;
    }
    let source = |fd: &OwnedFd| Source::Fd(fd.as_raw_fd());
    config.restore = Some(Restore {
        state: source(state),
        memory: SavedMemory::Mapped {
            layers: layers.iter().map(source).collect(),
            layout: Some(source(layout)),
        },
        prefault: Vec::new(),
        generation: None,
        hold: false,
    });
    fs::write(CONFIG, serde_json::to_vec(&config)?)?;
    let mut child = spawn(CONFIG, &events_end)?;
    drop(events_end);
    let mut spans = BTreeMap::from([(names::PAUSE.to_owned(), captured.pause_ns)]);
    let mut resumed = None;
    for line in BufReader::new(File::from(events)).lines() {
        if let VmmEvent::Span { name, start_ns, .. } = serde_json::from_str(&line?)?
            && name == names::VCPUS_RESUMED
        {
            resumed = Some(start_ns);
            break;
        }
    }
    let Some(resumed) = resumed else {
        bail!("the child ended early: {}", complaint(&mut child.0));
    };
    drop(child);
    spans.insert(names::VCPUS_RESUMED.to_owned(), resumed - start);
    Ok(Sample {
        nanoseconds: resumed - start,
        counters: BTreeMap::new(),
        spans,
    })
}

/// One boot and capture.
pub fn pause(config: &str) -> Result<Sample> {
    let config: VmmConfig = serde_json::from_slice(&fs::read(config)?)?;
    let mut parent = boot(&config)?;
    let captured = capture(&config, &mut parent)?;
    Ok(Sample {
        nanoseconds: captured.pause_ns,
        ..Sample::default()
    })
}

fn boot(config: &VmmConfig) -> Result<Running> {
    fs::write(CONFIG, serde_json::to_vec(config)?)?;
    let mut child = Running(command(CONFIG).spawn()?);
    to_marker(&mut child)?;
    Ok(child)
}

fn command(config: &str) -> Command {
    let mut command = Command::new(VMM);
    command
        .args(["run", "--config", config])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

fn spawn(config: &str, events: &OwnedFd) -> Result<Running> {
    let number = events.as_raw_fd().to_string();
    let mut command = command(config);
    Ok(Running(command.args(["--events-fd", &number]).spawn()?))
}

/// Waits for the marker. What the guest writes later nobody reads: the pipe
/// stays open and the serial port drops what it can't write.
fn to_marker(child: &mut Running) -> Result<()> {
    let stdout = child.0.stdout.as_mut().context("stdout is piped")?;
    let mut byte = [0];
    while byte[0] != MARKER {
        if stdout.read(&mut byte)? == 0 {
            bail!("it ended before the marker: {}", complaint(&mut child.0));
        }
    }
    Ok(())
}

fn complaint(child: &mut Child) -> String {
    let mut message = String::new();
    if let Some(stderr) = &mut child.stderr {
        let _ = stderr.take(4096).read_to_string(&mut message);
    }
    message.trim().into()
}

fn capture(config: &VmmConfig, parent: &mut Running) -> Result<Captured> {
    let mut fds = Vec::new();
    let request = ControlRequest::Capture { resume: true };
    let answer = ask(config, request, &mut fds).with_context(|| complaint(&mut parent.0))?;
    match answer {
        ControlResponse::Captured { pause_ns, .. } => Ok(Captured { pause_ns, fds }),
        other => bail!("{other:?}"),
    }
}

/// What the VM has written in its first milliseconds after the capture.
fn written(config: &VmmConfig) -> Result<Vec<Extent>> {
    std::thread::sleep(Duration::from_millis(20));
    match ask(config, ControlRequest::Written, &mut Vec::new())? {
        ControlResponse::Written(extents) => Ok(extents),
        other => bail!("{other:?}"),
    }
}

fn ask(
    config: &VmmConfig,
    request: ControlRequest,
    fds: &mut Vec<OwnedFd>,
) -> Result<ControlResponse> {
    let path = config.control.as_ref().context("a control socket")?;
    let until = Instant::now() + Duration::from_secs(10);
    let mut stream = loop {
        match UnixStream::connect(path) {
            Ok(stream) => break stream,
            Err(error) if Instant::now() > until => return Err(error.into()),
            Err(_) => std::thread::yield_now(),
        }
    };
    let mut line = serde_json::to_vec(&request)?;
    line.push(b'\n');
    stream.write_all(&line)?;
    let mut answer = Vec::new();
    let mut piece = vec![0; 64 << 10];
    while !answer.ends_with(b"\n") {
        match recv_with_fds(&stream, &mut piece, fds)? {
            0 => bail!("the monitor ended while it was asked"),
            count => answer.extend_from_slice(&piece[..count]),
        }
    }
    Ok(serde_json::from_slice(&answer)?)
}

fn contents(fd: &OwnedFd) -> Result<Vec<u8>> {
    let file = File::from(fd.try_clone()?);
    let mut bytes = vec![0; file.metadata()?.len() as usize];
    file.read_exact_at(&mut bytes, 0)?;
    Ok(bytes)
}

/// Mounts one over the folder, once.
pub fn huge_tmpfs(folder: &str) -> Result<()> {
    fs::create_dir_all(folder)?;
    if fs::read_to_string("/proc/mounts")?.contains(&format!(" {folder} ")) {
        return Ok(());
    }
    let options = c"huge=within_size";
    rustix::mount::mount(
        "none",
        folder,
        "tmpfs",
        rustix::mount::MountFlags::empty(),
        options,
    )?;
    Ok(())
}

/// Copies all that is not zero.
fn copy_sparse(from: &File, to: &Path) -> Result<()> {
    const BLOCK: usize = 2 << 20;
    let size = from.metadata()?.len();
    let target = File::create(to)?;
    target.set_len(size)?;
    let mut block = vec![0; BLOCK];
    for at in (0..size).step_by(BLOCK) {
        let length = BLOCK.min((size - at) as usize);
        from.read_exact_at(&mut block[..length], at)?;
        if block[..length].iter().any(|byte| *byte != 0) {
            target.write_all_at(&block[..length], at)?;
        }
    }
    Ok(())
}
