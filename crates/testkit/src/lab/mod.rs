//! A machine for tests, separate from the user's.
//!
//! * `cpus`: refuses more CPUs than QEMU can measure.
//! * `run`: runs programs in it, with their input, output and end.
//! * `threads`: what they wait for, if they do not end.

mod cpus;
mod run;
mod threads;

pub use run::{Output, Run, Running};

use crate::host_kernel;
use anyhow::{Context, Result, bail, ensure};
use jiffy_machine::client::AgentAddress;
use jiffy_machine::image::build::{Addition, additions_archive};
use jiffy_machine::instance::{self, Role};
use jiffy_machine::protocol::Ready;
use jiffy_machine::qemu::Setup;
use jiffy_machine::{Accelerator, disk};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::sync::{Mutex, OnceLock, mpsc};
use std::time::{Duration, Instant};

/// Time limit of a boot on a busy host.
const BOOT_LIMIT: Duration = Duration::from_secs(600);
/// Machines that the tests of a process may share. Each keeps one core busy.
pub const MOST_SHARED: usize = 2;
/// Prefix of the laboratory's folders in the temporary folder.
pub(crate) const PREFIX: &str = "jiffy-lab-";

/// Options of a machine.
#[derive(Debug, Clone)]
pub struct LabOptions {
    /// Folder with `vmlinux` and `initramfs.cpio`.
    pub image: PathBuf,
    /// Builds the image with Debian's newest kernel of this series (`6.1`) and Jiffy's programs
    /// from [`dist`], instead of using `image`; `sched`: boots `image` with the kernel that has
    /// sched_ext.
    pub kernel: Option<String>,
    /// Further kernel parameters.
    pub kernel_args: String,
    /// RAM in MiB.
    pub memory_mib: u32,
    /// CPUs.
    pub cpus: u8,
    /// Accelerator.
    pub accelerator: Accelerator,
    /// Size in GiB of an XFS disk at /var/lib/jiffy.
    pub disk_gib: Option<u32>,
    /// Run `jiffyd` as PID 1's service, as the user's machine does.
    pub node: bool,
    /// Additional files in the initramfs.
    pub files: Vec<Addition>,
}

impl Default for LabOptions {
    fn default() -> LabOptions {
        LabOptions {
            image: default_image(),
            kernel: None,
            kernel_args: String::new(),
            memory_mib: 4096,
            cpus: 1,
            accelerator: Accelerator::Tcg,
            disk_gib: Some(16),
            node: false,
            files: Vec::new(),
        }
    }
}

/// The folder of the machine's image: `$JIFFY_LAB_IMAGE`, or `share/jiffy/machine` in [`dist`].
fn default_image() -> PathBuf {
    match std::env::var_os("JIFFY_LAB_IMAGE") {
        Some(folder) => folder.into(),
        None => dist().join("share/jiffy/machine"),
    }
}

/// The folder of Jiffy's installation: `$JIFFY_DIST`, or the result of `make build` in this
/// checkout.
pub fn dist() -> PathBuf {
    std::env::var_os("JIFFY_DIST").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../dist"),
        PathBuf::from,
    )
}

/// A running machine. Its QEMU ends when this is dropped or the process exits or is killed.
#[derive(Debug)]
pub struct Lab {
    agent: AgentAddress,
    console: PathBuf,
    boot: Duration,
    ready_after: Duration,
    _keeper: ParentThread,
    _folder: tempfile::TempDir,
}

impl Lab {
    /// The machine that all tests of this process share, with a disk and without a node. The first
    /// caller boots it.
    ///
    /// # Errors
    ///
    /// If it can't be booted, for the first caller or an earlier one (see [`boot`](Lab::boot)).
    pub fn shared() -> Result<&'static Lab> {
        Lab::shared_one(0)
    }

    /// Like [`shared`](Lab::shared), one of [`MOST_SHARED`] independent machines.
    ///
    /// # Errors
    ///
    /// If it can't be booted, for the first caller or an earlier one (see [`boot`](Lab::boot)).
    pub fn shared_one(number: usize) -> Result<&'static Lab> {
        static SHARED: [OnceLock<Result<Lab, String>>; MOST_SHARED] =
            [const { OnceLock::new() }; MOST_SHARED];
        let lab = SHARED[number].get_or_init(|| {
            let lab = Lab::boot(LabOptions::default()).map_err(|error| format!("{error:#}"))?;
            remove_at_exit(lab._folder.path());
            Ok(lab)
        });
        lab.as_ref().map_err(|error| anyhow::anyhow!("{error}"))
    }

    /// Boots a machine.
    ///
    /// # Errors
    ///
    /// If the options don't fit each other, a file of the machine is missing, it is not ready
    /// within 600 s, or it has no working `/dev/kvm`.
    pub fn boot(options: LabOptions) -> Result<Lab> {
        cpus::check(options.cpus, options.accelerator)?;
        remove_stale_folders();
        let folder = tempfile::Builder::new()
            .prefix(PREFIX)
            .tempdir()
            .context("making a temporary folder")?;
        let setup = setup(&options, folder.path())?;
        let token = instance::new_token()?;
        let config = instance::guest_config(Role {
            disk: options.disk_gib.is_some(),
            node: options.node,
            scheduler: options.kernel.as_deref() == Some(host_kernel::SCHED),
            intel: false,
            debugfs: true,
            // On the instruction clock, the thread that executes the CPU raises the timer's interrupts.
            heartbeat: options.accelerator == Accelerator::Tcg,
            shares: &[],
        });
        let begin = Instant::now();
        let (keeper, mut child) = ParentThread::start(setup.clone(), config, token.clone())?;
        let (mut kvm, mut ready_after) = (false, Duration::ZERO);
        instance::wait_until_ready(&setup, Some(&mut child), BOOT_LIMIT, |ready| {
            if let Ready::Agent {
                kvm: there,
                uptime_ms,
            } = ready
            {
                kvm = *there;
                ready_after = Duration::from_millis(*uptime_ms);
            }
        })
        .with_context(|| format!("booting the lab; its console:\n{}", tail(&setup.console)))?;
        keeper.add_child(child);
        ensure!(
            kvm,
            "the lab booted without /dev/kvm; its console:\n{}",
            tail(&setup.console)
        );
        let agent = instance::agent(&setup, &token)?;
        Ok(Lab {
            agent,
            console: setup.console,
            boot: begin.elapsed(),
            ready_after,
            _keeper: keeper,
            _folder: folder,
        })
    }

    /// Prepares a program; [`Run::output`] or [`Run::start`] runs it.
    pub fn command<I, S>(&self, argv: I) -> Run<'_>
    where
        I: IntoIterator<Item = S>,
        S: Into<String>,
    {
        Run::new(self, argv.into_iter().map(Into::into).collect())
    }

    /// Runs a program until it exits.
    ///
    /// # Errors
    ///
    /// If it can't be started, runs longer than 600 s, or the connection to the machine is lost.
    /// Its exit status is in the [`Output`].
    pub fn run<I, S>(&self, argv: I) -> Result<Output>
    where
        I: IntoIterator<Item = S>,
        S: Into<String>,
    {
        self.command(argv).output()
    }

    /// Runs a shell script.
    ///
    /// # Errors
    ///
    /// If [`run`](Lab::run) fails; not if the script does.
    pub fn sh(&self, script: &str) -> Result<Output> {
        self.run(["/bin/sh", "-c", script])
    }

    /// Copies a file of the host into the machine and creates missing folders.
    ///
    /// # Errors
    ///
    /// If the file can't be read on the host, or written in the machine.
    pub fn push(&self, host: &Path, guest: &str) -> Result<()> {
        let contents =
            std::fs::read(host).with_context(|| format!("reading {}", host.display()))?;
        use std::os::unix::fs::PermissionsExt;
        let mode = std::fs::metadata(host)?.permissions().mode() & 0o777;
        self.write(guest, mode, contents)
    }

    /// Writes a file in the machine, with `mode` as its permission bits, and creates missing
    /// folders.
    ///
    /// # Errors
    ///
    /// If it can't be written.
    pub fn write(&self, guest: &str, mode: u32, contents: Vec<u8>) -> Result<()> {
        let script =
            r#"mkdir -p "${1%/*}" && cat > "$1.new" && chmod "$2" "$1.new" && mv "$1.new" "$1""#;
        let mode = format!("{mode:o}");
        self.command(["/bin/sh", "-c", script, "push", guest, &mode])
            .stdin(contents)
            .output()?
            .success()
            .with_context(|| format!("writing {guest} in the machine"))?;
        Ok(())
    }

    /// Reads a file in the machine.
    ///
    /// # Errors
    ///
    /// If it can't be read.
    pub fn read(&self, guest: &str) -> Result<Vec<u8>> {
        Ok(self.run(["/bin/cat", guest])?.success()?.stdout)
    }

    /// Time from the start of QEMU until the agent took commands.
    pub fn boot_time(&self) -> Duration {
        self.boot
    }

    /// Time from the start of its kernel until the agent took commands, on the machine's clock.
    pub fn ready_after(&self) -> Duration {
        self.ready_after
    }

    /// CPU time that the machine has used so far. Unlike [`boot_time`](Lab::boot_time) it varies
    /// little on a busy host.
    ///
    /// # Errors
    ///
    /// If QEMU has ended.
    pub fn cpu_time(&self) -> Result<Duration> {
        let pid = instance::running_pid(&self._folder.path().join("pid"))
            .context("the lab's QEMU has ended")?;
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero()))?;
        // utime and stime are the 14th and 15th field; the second field may contain spaces.
        let fields = stat.rsplit(')').next().unwrap_or_default();
        let ticks: u64 = fields
            .split_whitespace()
            .skip(11)
            .take(2)
            .filter_map(|field| field.parse::<u64>().ok())
            .sum();
        Ok(Duration::from_millis(ticks * 10))
    }

    /// The end of its console: messages of the kernel and PID 1.
    pub fn console(&self) -> String {
        tail(&self.console)
    }

    /// The agent, which runs programs.
    pub fn agent(&self) -> &AgentAddress {
        &self.agent
    }
}

fn setup(options: &LabOptions, folder: &Path) -> Result<Setup> {
    let mut image = options.image.clone();
    let mut kernel = None;
    match options.kernel.as_deref() {
        None => {}
        // Its drivers are built in: the image of Debian's kernel is the one it needs.
        Some(host_kernel::SCHED) => kernel = Some(host_kernel::built(host_kernel::SCHED)?),
        Some(series) => {
            image = folder.join("image");
            host_kernel::machine_image(series, &dist(), &image)?;
        }
    }
    let mut initramfs = image.join("initramfs.cpio");
    if !options.files.is_empty() {
        // The kernel unpacks concatenated archives in order.
        let joined = folder.join("initramfs.cpio");
        std::fs::copy(&initramfs, &joined)
            .with_context(|| format!("copying {}", initramfs.display()))?;
        std::fs::OpenOptions::new()
            .append(true)
            .open(&joined)?
            .write_all(&additions_archive(&options.files)?)?;
        initramfs = joined;
    }
    let disk = match options.disk_gib {
        Some(size) => {
            let path = folder.join("disk.img");
            disk::ensure(&path, size)?;
            Some(path)
        }
        None => None,
    };
    Ok(Setup {
        kernel: kernel.unwrap_or_else(|| image.join("vmlinux")),
        initramfs,
        kernel_args: options.kernel_args.clone(),
        memory_mib: options.memory_mib,
        cpus: options.cpus,
        accelerator: options.accelerator,
        disk,
        run: folder.to_path_buf(),
        console: folder.join("console.log"),
        daemonize: false,
    })
}

pub(crate) fn tail(console: &Path) -> String {
    let text = std::fs::read(console).unwrap_or_default();
    let text = String::from_utf8_lossy(&text).into_owned();
    let lines: Vec<_> = text.lines().collect();
    lines[lines.len().saturating_sub(40)..].join("\n")
}

/// The thread that is QEMU's parent. QEMU ends with the thread that started it (PR_SET_PDEATHSIG),
/// and a test's thread would end too early.
#[derive(Debug)]
struct ParentThread {
    children: Option<mpsc::Sender<Child>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl ParentThread {
    fn start(
        setup: Setup,
        config: jiffy_wire::guest::GuestConfig,
        token: String,
    ) -> Result<(ParentThread, Child)> {
        let (started, result) = mpsc::channel();
        let (children, to_keep) = mpsc::channel::<Child>();
        let thread = std::thread::Builder::new()
            .name("qemu".into())
            .spawn(move || {
                let _ = started.send(instance::launch(&setup, &config, &token, &[]));
                // The iteration ends when all senders are dropped.
                let mut kept: Vec<Child> = to_keep.into_iter().collect();
                for child in &mut kept {
                    let _ = child.kill();
                    let _ = child.wait();
                }
            })?;
        let keeper = ParentThread {
            children: Some(children),
            thread: Some(thread),
        };
        match result
            .recv()
            .context("the thread that starts QEMU ended")??
        {
            Some(child) => Ok((keeper, child)),
            None => bail!("QEMU was started as a daemon"),
        }
    }

    fn add_child(&self, child: Child) {
        if let Some(children) = &self.children {
            let _ = children.send(child);
        }
    }
}

impl Drop for ParentThread {
    fn drop(&mut self) {
        self.children.take();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

static TO_REMOVE: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// Removes the folders of statics at exit, because statics are never dropped.
#[allow(unsafe_code)]
fn remove_at_exit(folder: &Path) {
    extern "C" fn remove_all() {
        if let Ok(folders) = TO_REMOVE.lock() {
            for folder in folders.iter() {
                let _ = instance::kill(&folder.join("pid"));
                let _ = std::fs::remove_dir_all(folder);
            }
        }
    }
    if let Ok(mut folders) = TO_REMOVE.lock() {
        if folders.is_empty() {
            // SAFETY: `remove_all` is a plain function, which exists for the whole program.
            unsafe {
                libc::atexit(remove_all);
            }
        }
        folders.push(folder.into());
    }
}

/// Removes folders of laboratories whose process was killed.
fn remove_stale_folders() {
    let Ok(entries) = std::fs::read_dir(std::env::temp_dir()) else {
        return;
    };
    for entry in entries.flatten() {
        let ours = entry.file_name().to_string_lossy().starts_with(PREFIX);
        let old = entry
            .metadata()
            .and_then(|metadata| metadata.modified())
            .ok()
            .and_then(|modified| modified.elapsed().ok())
            .is_some_and(|age| age > Duration::from_secs(600));
        if ours && old && instance::running_pid(&entry.path().join("pid")).is_none() {
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}
