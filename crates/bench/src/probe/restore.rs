//! Measures capture, restore and fork of `jiffy-vmm` without a node.

use super::marker_time::Output;
use super::{Running, event_spans, kvm_counters, now_ns, remove_socket};
use crate::machine::VMM;
use crate::plan::{Sample, VSOCK};
use anyhow::{Context, Result, bail};
use jiffy_store::write_raw;
use jiffy_sys::fds::send_with_fds;
use jiffy_sys::spare;
use jiffy_testkit::monitor::{self, Captured};
use jiffy_wire::timeline::names;
use jiffy_wire::vmm::{
    ControlRequest, ControlResponse, Extent, Restore, SavedMemory, Source, TakeSpare, VmmConfig,
    VmmEvent,
};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// A tmpfs with huge pages. XFS's page cache has large pages as well for files that were written in
/// large pieces.
pub const SNAPSHOT: &str = "/bench/snapshot";
const STATE: &str = "/bench/snapshot/state";
pub const RAM: &str = "/bench/snapshot/ram.raw";
const CONFIG: &str = "/bench/restore.json";
const CHILD_VSOCK: &str = "/tmp/bench-vsock-child.sock";

/// Time between a guest's marker and its capture, in which it becomes idle.
pub const SETTLE_TIME: Duration = Duration::from_millis(100);

/// A booted VM and its capture.
pub struct Stage {
    config: VmmConfig,
    parent: BootedVm,
    prefault: Vec<Extent>,
}

/// A VMM whose guest has written its marker.
pub struct BootedVm {
    process: Running,
    _output: OwnedFd,
}

/// Source of a restore's RAM.
pub enum Memory {
    /// The raw file.
    Mapped,
    /// Socket of a pager, and whether the pager has the working set.
    Paged(PathBuf, bool),
}

impl Stage {
    /// The stage of a case, created by its first run.
    ///
    /// # Errors
    ///
    /// If the parent can't be booted or captured.
    pub fn of<'a>(stage: &'a mut Option<Stage>, config: &str) -> Result<&'a mut Stage> {
        if stage.is_none() {
            *stage = Some(Stage::new(config)?);
        }
        Ok(stage.as_mut().expect("just made"))
    }

    /// Boots a VM and captures it into files for restores.
    fn new(config: &str) -> Result<Stage> {
        let config: VmmConfig = serde_json::from_slice(&fs::read(config)?)?;
        let mut parent = boot(&config)?;
        let captured = capture(&config, &mut parent)?;
        let [state, _, ram] = captured.fds.as_slice() else {
            bail!("{} descriptors were captured", captured.fds.len());
        };
        huge_tmpfs(SNAPSHOT)?;
        fs::write(STATE, contents(state)?)?;
        write_raw(Path::new(RAM), &File::from(ram.try_clone()?))?;
        // As the node does for golden snapshots: pages that the parent writes when it is resumed
        // are prefaulted, because its children will write them too.
        let prefault = written(&config)?;
        Ok(Stage {
            config,
            parent,
            prefault,
        })
    }
}

impl Stage {
    /// Ends the parent: nothing else may run while restores are measured.
    ///
    /// # Errors
    ///
    /// If its socket can't be removed.
    pub fn end_parent(&mut self) -> Result<()> {
        let _ = self.parent.process.0.kill();
        let _ = self.parent.process.0.wait();
        remove_socket(VSOCK)
    }
}

/// Measures one restore from the files, by a new VMM or by a spare.
///
/// # Errors
///
/// If the VMM can't be started, or the restored guest writes no marker.
pub fn restore(stage: &mut Stage, spare: bool) -> Result<Sample> {
    stage.end_parent()?;
    match spare {
        true => restore_by_spare(stage),
        false => Ok(timed(stage, &Memory::Mapped, false)?.0),
    }
}

/// The configuration of a restore.
fn restored(stage: &Stage, memory: &Memory) -> VmmConfig {
    let mut config = stage.config.clone();
    config.control = None;
    config.restore = Some(Restore {
        state: Source::Path(STATE.into()),
        memory: match memory {
            Memory::Mapped => SavedMemory::Mapped {
                layers: vec![Source::Path(RAM.into())],
                layout: None,
            },
            Memory::Paged(socket, working_set) => SavedMemory::Paged {
                socket: socket.clone(),
                working_set: *working_set,
            },
        },
        prefault: match memory {
            Memory::Mapped => stage.prefault.clone(),
            Memory::Paged(..) => Vec::new(),
        },
        map_ahead: Vec::new(),
        no_readahead: false,
        gate_record: None,
        generation: None,
        hold: false,
    });
    config
}

/// Measures a restore to the marker, by a new VMM or by a spare; returns the restored VM too.
///
/// # Errors
///
/// If the VMM can't be started, or the restored guest writes no marker.
pub fn timed(stage: &Stage, memory: &Memory, spare: bool) -> Result<(Sample, BootedVm)> {
    let config = restored(stage, memory);
    let (events, (child, start, end)) = match spare {
        true => {
            let spare = Spare::ready()?;
            let (output, output_end) = Output::new()?;
            let start = now_ns();
            write_config(&config)?;
            let (process, events) = spare.take(&[], output_end)?;
            (events, marker_of(process, output, start)?)
        }
        false => {
            write_config(&config)?;
            let (events, events_end) = rustix::pipe::pipe()?;
            (events, wait_for_marker(Some(events_end))?)
        }
    };
    let sample = Sample {
        nanoseconds: end - start,
        counters: kvm_counters(child.process.0.id()),
        spans: spans_so_far(events, start)?,
    };
    Ok((sample, child))
}

/// Spans reported so far; the VMM still runs.
fn spans_so_far(events: OwnedFd, start: u64) -> Result<BTreeMap<String, u64>> {
    let length = rustix::io::ioctl_fionread(&events)?;
    Ok(event_spans(File::from(events).take(length), start))
}

fn restore_by_spare(stage: &Stage) -> Result<Sample> {
    let config = restored(stage, &Memory::Mapped);
    let spare = Spare::ready()?;
    let start = now_ns();
    write_config(&config)?;
    spare.resume(&[], start)
}

/// Measures one fork of the running parent into a spare VMM, as the node does it.
///
/// # Errors
///
/// If the parent can't be captured, or the spare VMM does not resume it.
pub fn fork(stage: &mut Stage) -> Result<Sample> {
    let mut config = stage.config.clone();
    config.control = None;
    if let Some(vsock) = &mut config.vsock {
        vsock.path = CHILD_VSOCK.into();
    }
    remove_socket(CHILD_VSOCK)?;
    let spare = Spare::ready()?;
    let start = now_ns();
    let captured = capture(&stage.config, &mut stage.parent)?;
    config.restore = Some(captured.for_spare()?);
    write_config(&config)?;
    let mut sample = spare.resume(&captured.fds, start)?;
    sample
        .spans
        .insert(names::PAUSE.to_owned(), captured.pause_ns);
    Ok(sample)
}

/// A spare VMM.
struct Spare {
    socket: OwnedFd,
    process: Running,
}

impl Spare {
    /// Starts a spare and waits until it is ready.
    fn ready() -> Result<Spare> {
        let (socket, theirs) = spare::pair()?;
        rustix::io::fcntl_setfd(&theirs, rustix::io::FdFlags::empty())?;
        let number = theirs.as_raw_fd().to_string();
        let process = Command::new(VMM)
            .args(["run", "--config", CONFIG, "--spare-fd", &number])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()?;
        // Nothing else runs in the machine, so this is long enough.
        std::thread::sleep(Duration::from_millis(100));
        Ok(Spare {
            socket,
            process: Running(process),
        })
    }

    /// Turns the spare into the VM of [`CONFIG`], which writes to `output`. Returns its process, and
    /// the pipe of its events.
    fn take(self, sources: &[OwnedFd], output: OwnedFd) -> Result<(Running, OwnedFd)> {
        let (events, events_end) = rustix::pipe::pipe()?;
        let take = serde_json::to_vec(&TakeSpare {
            config: CONFIG.into(),
            config_fd: None,
        })?;
        let mut descriptors = vec![output.as_fd(), events_end.as_fd()];
        descriptors.extend(sources.iter().map(AsFd::as_fd));
        send_with_fds(&self.socket, &take, &descriptors)?;
        Ok((self.process, events))
    }

    /// Turns the spare into the VM of [`CONFIG`]; measures from `start` until its vCPUs are resumed.
    fn resume(self, sources: &[OwnedFd], start: u64) -> Result<Sample> {
        let (output, output_end) = rustix::pipe::pipe()?;
        let (_process, events) = self.take(sources, output_end)?;
        let mut spans = BTreeMap::new();
        for line in BufReader::new(File::from(events)).lines() {
            let VmmEvent::Span {
                name,
                start_ns,
                end_ns,
                ..
            } = serde_json::from_str(&line?)?
            else {
                continue;
            };
            let from = if start_ns == end_ns { start } else { start_ns };
            let resumed = name == names::VCPUS_RESUMED;
            spans.insert(name, end_ns - from);
            if resumed {
                return Ok(Sample {
                    nanoseconds: end_ns - start,
                    counters: BTreeMap::new(),
                    spans,
                });
            }
        }
        let mut message = String::new();
        let _ = File::from(output).take(4096).read_to_string(&mut message);
        bail!("it ended early: {}", message.trim());
    }
}

/// Measures one full capture of a newly booted VM.
///
/// # Errors
///
/// If the configuration can't be read, or the VM can't be booted or captured.
pub fn pause(config: &str) -> Result<Sample> {
    let config: VmmConfig = serde_json::from_slice(&fs::read(config)?)?;
    let mut parent = boot(&config)?;
    let captured = capture(&config, &mut parent)?;
    Ok(Sample {
        nanoseconds: captured.pause_ns,
        ..Sample::default()
    })
}

/// Boots a guest and waits until it is idle.
fn boot(config: &VmmConfig) -> Result<BootedVm> {
    write_config(config)?;
    let (parent, ..) = wait_for_marker(None)?;
    std::thread::sleep(SETTLE_TIME);
    Ok(parent)
}

fn write_config(config: &VmmConfig) -> Result<()> {
    Ok(fs::write(CONFIG, serde_json::to_vec(config)?)?)
}

/// Starts the VM of [`CONFIG`] and waits for its marker. Returns the times of both.
fn wait_for_marker(events: Option<OwnedFd>) -> Result<(BootedVm, u64, u64)> {
    let (output, output_end) = Output::new()?;
    let start = now_ns();
    let process = spawn(output_end.into(), events.as_ref())?;
    drop(events);
    marker_of(process, output, start)
}

/// Waits for the marker of a VM that was started at `start`. Returns both times.
fn marker_of(mut process: Running, output: Output, start: u64) -> Result<(BootedVm, u64, u64)> {
    let waited = output.wait();
    let (end, output) = waited.with_context(|| last_stderr(&mut process.0))?;
    let vm = BootedVm {
        process,
        _output: output,
    };
    Ok((vm, start, end))
}

fn spawn(output: Stdio, events: Option<&OwnedFd>) -> Result<Running> {
    let mut command = Command::new(VMM);
    command
        .args(["run", "--config", CONFIG])
        .stdin(Stdio::null())
        .stdout(output)
        .stderr(Stdio::piped());
    if let Some(events) = events {
        command.args(["--events-fd", &events.as_raw_fd().to_string()]);
    }
    Ok(Running(command.spawn()?))
}

/// Ends a VMM; what it wrote to stderr.
fn last_stderr(child: &mut Child) -> String {
    let mut message = String::new();
    // The pipe has an end only if nobody can write to it.
    let _ = child.kill();
    if let Some(stderr) = &mut child.stderr {
        let _ = stderr.take(4096).read_to_string(&mut message);
    }
    message.trim().into()
}

fn capture(config: &VmmConfig, parent: &mut BootedVm) -> Result<Captured> {
    monitor::capture(control(config)?, true).with_context(|| last_stderr(&mut parent.process.0))
}

/// Pages that the VM wrote in the first 20 ms after the capture.
fn written(config: &VmmConfig) -> Result<Vec<Extent>> {
    std::thread::sleep(Duration::from_millis(20));
    match monitor::ask(control(config)?, &ControlRequest::Written, &mut Vec::new())? {
        ControlResponse::Written(extents) => Ok(extents),
        other => bail!("{other:?}"),
    }
}

fn control(config: &VmmConfig) -> Result<&Path> {
    config.control.as_deref().context("no control socket")
}

fn contents(fd: &OwnedFd) -> Result<Vec<u8>> {
    let file = File::from(fd.try_clone()?);
    let mut bytes = vec![0; file.metadata()?.len() as usize];
    file.read_exact_at(&mut bytes, 0)?;
    Ok(bytes)
}

/// Mounts a tmpfs with huge pages over the folder, unless one is mounted.
///
/// # Errors
///
/// If the folder can't be made, or `mount` fails.
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
