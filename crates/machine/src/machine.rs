//! The user's machine: one for each data folder.

use crate::client::AgentAddress;
use crate::disk;
use crate::error::MachineError;
use crate::instance::{self, Role, remove};
use crate::options::{Accelerator, Options, Size};
use crate::protocol::Ready;
use crate::qemu::Setup;
use crate::qmp::Control;
use crate::servers::Servers;
use crate::shares::Share;
use jiffy_sys::locked::{self, Locked};
use jiffy_sys::ownership::is_mine_alone;
use serde::{Deserialize, Serialize};
use std::ffi::OsString;
use std::fs::File;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

/// Time limit until a machine is ready. Software emulation on a busy host is slow; a machine that
/// fails reports it at once.
const START_LIMIT: Duration = Duration::from_secs(180);
/// Least free disk space, bytes, to resume a machine that QEMU paused because the disk
/// was full.
const LEAST_SPACE: u64 = 1 << 20;
/// How long programs in the machine may take to end when it is stopped.
const STOP_GRACE: Duration = Duration::from_secs(5);
/// How long QEMU may take to end after that.
const STOP_LIMIT: Duration = Duration::from_secs(60);
/// How long an ending QEMU may keep its disk open after its pid file is gone.
const DISK_LIMIT: Duration = Duration::from_secs(3);

/// The folders of a machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Paths {
    /// Jiffy's data folder; the machine's files are in `machine/`.
    pub data: PathBuf,
    /// Jiffy's run folder; the machine's sockets are in `machine/`. A running machine keeps the run
    /// folder with which it was started.
    pub run: PathBuf,
    /// Folder of Jiffy's programs, with `jiffy-files`.
    pub lib: PathBuf,
    /// Jiffy's share folder, with `machine/vmlinux` and `machine/initramfs.cpio`.
    pub share: PathBuf,
}

/// Address and token of the node in the machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Endpoint {
    /// Address on the host's loopback.
    pub address: SocketAddr,
    /// Token for `Authorization: Bearer`.
    pub token: String,
}

/// A stage of the start, for a progress line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// The data disk is being created.
    Disk,
    /// QEMU is being started.
    Qemu,
    /// The machine's kernel runs.
    System {
        /// Whether there is a `/dev/kvm`.
        kvm: bool,
        /// Time since the start of QEMU.
        after: Duration,
    },
    /// The node accepts connections.
    Ready {
        /// Time since the start of QEMU.
        after: Duration,
    },
}

/// The output of `jiffy machine status`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Status {
    /// Its state.
    pub state: State,
    /// QEMU's process id.
    pub pid: Option<i32>,
    /// Its size and shared folders at the next start.
    pub size: Size,
    /// Folders that it shares while it runs.
    pub shares: Option<Vec<Share>>,
    /// Bytes the data disk occupies on the host; `None` without a disk.
    pub disk_used: Option<u64>,
    /// Time since its start, seconds.
    pub uptime_s: Option<u64>,
    /// The node's address on the host's loopback.
    pub address: Option<SocketAddr>,
}

/// State of a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// It does not run.
    Stopped,
    /// It runs.
    Running,
    /// It runs but is not ready: another command is starting it, or died while doing so.
    Starting,
    /// QEMU has paused it because the host's disk is full.
    HostDiskFull,
    /// QEMU runs but does not answer.
    Unresponsive,
}

/// Saved once the machine is ready; removed when it ends.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Running {
    format: u32,
    /// QEMU's process id, to detect a stale file.
    pid: i32,
    api: SocketAddr,
    agent: SocketAddr,
    token: String,
    started: u64,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    shares: Vec<Share>,
}

/// The machine of one data folder. Creating this value starts nothing.
#[derive(Debug, Clone)]
pub struct Machine {
    paths: Paths,
}

impl Machine {
    /// The machine that belongs to these folders.
    pub fn open(paths: Paths) -> Machine {
        Machine { paths }
    }

    /// The node of the running machine; `None` if the machine does not run or is not ready.
    pub fn endpoint(&self) -> Option<Endpoint> {
        let running = self.running()?;
        Some(Endpoint {
            address: running.api,
            token: running.token,
        })
    }

    /// Starts the machine, unless it runs. If several callers start it, one does and the others
    /// wait. Options are saved; they apply from the next start.
    ///
    /// # Errors
    ///
    /// If an option is out of range or the disk has another size, a program, a file or the disk
    /// can't be used, the machine is not ready in time, or it stays paused because the host's disk
    /// is full.
    pub fn start(
        &self,
        options: Options,
        progress: &mut dyn FnMut(Stage),
    ) -> Result<Endpoint, MachineError> {
        let _lock = self.lock()?;
        let has_options = options != Options::default();
        self.check_disk_size(options.disk_gib)?;
        let size = Size::load(&self.size_file())?.with(options)?;
        if has_options || !self.size_file().exists() {
            size.save(&self.size_file())?;
        }
        let setup = self.setup(&size);
        if instance::running_pid(&setup.pid_file()).is_some() {
            if let Some(endpoint) = self.endpoint() {
                self.resume_after_full_disk(&setup)?;
                return Ok(endpoint);
            }
            // The command that started it died before it was ready.
            instance::kill(&setup.pid_file())?;
        }
        self.start_new(&size, progress)
    }

    fn start_new(
        &self,
        size: &Size,
        progress: &mut dyn FnMut(Stage),
    ) -> Result<Endpoint, MachineError> {
        self.check_disk_is_free()?;
        if let Some(path) = size.kernel.as_ref().filter(|path| !path.is_file()) {
            return Err(MachineError::NoKernel { path: path.clone() });
        }
        let run = self.own_run_folder();
        let setup = &self.setup_in(run.clone(), size);
        remove(&running_file(&run))?;
        instance::check(setup)?;
        if !self.has_disk() {
            disk::find_mkfs()?;
            progress(Stage::Disk);
            disk::ensure(&self.disk_file(), size.disk_gib)?;
        }
        progress(Stage::Qemu);
        let begin = Instant::now();
        let token = instance::new_token()?;
        let config = instance::guest_config(Role {
            disk: true,
            node: true,
            scheduler: size.kernel.is_some(),
            intel: !instance::is_software(size.accelerator) && instance::host_is_intel(),
            debugfs: false,
            heartbeat: size.accelerator == Accelerator::Tcg,
            shares: &size.shares,
        });
        self.save_run_folder()?;
        let servers = self.serve(&size.shares)?;
        instance::launch(setup, &config, &token, servers.sockets())?;
        let ready = instance::wait_until_ready(setup, None, START_LIMIT, |ready| {
            let after = begin.elapsed();
            match ready {
                Ready::Agent { kvm, .. } => progress(Stage::System { kvm: *kvm, after }),
                Ready::Services { .. } => progress(Stage::Ready { after }),
                Ready::Failed { .. } => {}
            }
        });
        let started = ready.and_then(|()| self.save_running(setup, token, &size.shares));
        match started.is_ok() {
            true => servers.release(),
            false => instance::kill(&setup.pid_file())?,
        }
        started
    }

    /// Starts the servers of shared folders. Their log is replaced.
    fn serve(&self, shares: &[Share]) -> Result<Servers, MachineError> {
        let log = self.servers_log();
        let opened = match shares.is_empty() {
            true => return remove(&log).map(|()| Servers::default()),
            false => File::create(&log).map_err(|error| MachineError::file(&log, error))?,
        };
        Servers::start(&self.paths.lib.join("jiffy-files"), shares, opened.as_fd())
    }

    fn save_running(
        &self,
        setup: &Setup,
        token: String,
        shares: &[Share],
    ) -> Result<Endpoint, MachineError> {
        let (api, agent) = instance::forwarded_addresses(setup)?;
        let pid = instance::running_pid(&setup.pid_file())
            .ok_or(MachineError::NotRunning)?
            .as_raw_nonzero()
            .get();
        let started = SystemTime::now()
            .duration_since(SystemTime::UNIX_EPOCH)
            .map_or(0, |since| since.as_secs());
        let running = Running {
            format: 1,
            pid,
            api,
            agent,
            token: token.clone(),
            started,
            shares: shares.to_vec(),
        };
        let path = running_file(&setup.run);
        let bytes = serde_json::to_vec(&running)
            .map_err(|error| MachineError::file(&path, error.into()))?;
        // The token is protected by the folder as well, which others can't enter.
        jiffy_sys::durable::replace(&path, &bytes)
            .and_then(|()| {
                use std::os::unix::fs::PermissionsExt;
                std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600))
            })
            .map_err(|error| MachineError::file(&path, error))?;
        Ok(Endpoint {
            address: api,
            token,
        })
    }

    /// Resumes a machine that QEMU paused because the disk was full, if there is space now.
    fn resume_after_full_disk(&self, setup: &Setup) -> Result<(), MachineError> {
        let mut control = Control::connect(&setup.control_socket())?;
        if control.status()? != "io-error" {
            return Ok(());
        }
        // Without space QEMU would pause it again.
        let space = rustix::fs::statvfs(&self.paths.data);
        if space.is_ok_and(|space| space.f_bfree * space.f_frsize < LEAST_SPACE) {
            return Err(MachineError::HostDiskFull {
                path: self.paths.data.clone(),
            });
        }
        control.execute("cont", serde_json::Value::Null)?;
        std::thread::sleep(Duration::from_millis(300));
        if control.status()? == "io-error" {
            return Err(MachineError::HostDiskFull {
                path: self.paths.data.clone(),
            });
        }
        Ok(())
    }

    /// Shuts the machine and its VMs down; returns whether it ran.
    ///
    /// # Errors
    ///
    /// If QEMU does not end, another process uses the disk, or a file can't be removed.
    pub fn stop(&self) -> Result<bool, MachineError> {
        let _lock = self.lock()?;
        self.stop_locked()
    }

    fn stop_locked(&self) -> Result<bool, MachineError> {
        let setup = self.setup(&Size::default_for_host());
        let pid_file = setup.pid_file();
        let ran = instance::running_pid(&pid_file).is_some();
        if ran {
            if let Some(agent) = self.agent()
                && agent.power_off(STOP_GRACE).is_ok()
            {
                instance::wait_for_end(&pid_file, STOP_LIMIT);
            }
            instance::kill(&pid_file)?;
        } else {
            self.check_disk_is_free()?;
        }
        for file in [
            running_file(&setup.run),
            self.run_folder_file(),
            setup.control_socket(),
            setup.ready_socket(),
            setup.token_file(),
            setup.config_file(),
            pid_file,
        ] {
            remove(&file)?;
        }
        Ok(ran)
    }

    /// Refuses another size for a disk that exists: nothing would change it.
    fn check_disk_size(&self, wanted_gib: Option<u32>) -> Result<(), MachineError> {
        match (wanted_gib, self.disk_gib()) {
            (Some(wanted), Some(has)) if wanted != has => Err(MachineError::DiskSize { has }),
            _ => Ok(()),
        }
    }

    /// The size of the data disk in GiB, if there is one.
    fn disk_gib(&self) -> Option<u32> {
        let disk = std::fs::metadata(self.disk_file()).ok()?;
        u32::try_from(disk.len() >> 30).ok()
    }

    /// Its state and size.
    ///
    /// # Errors
    ///
    /// If the saved size can't be read.
    pub fn status(&self) -> Result<Status, MachineError> {
        use std::os::unix::fs::MetadataExt;
        let mut size = Size::load(&self.size_file())?;
        // A release that saved the size of an existing disk did not change the disk.
        size.disk_gib = self.disk_gib().unwrap_or(size.disk_gib);
        let setup = self.setup(&size);
        let pid = instance::running_pid(&setup.pid_file());
        let running = self.running();
        let state = match (&pid, &running) {
            (None, _) => State::Stopped,
            (Some(_), None) => State::Starting,
            (Some(_), Some(_)) => {
                let status = Control::connect(&setup.control_socket())
                    .and_then(|mut control| control.status());
                match status.as_deref() {
                    Ok("io-error") => State::HostDiskFull,
                    Ok(_) => State::Running,
                    Err(_) => State::Unresponsive,
                }
            }
        };
        let now = SystemTime::now()
            .duration_since(SystemTime::UNIX_EPOCH)
            .map_or(0, |since| since.as_secs());
        Ok(Status {
            state,
            pid: pid.map(|pid| pid.as_raw_nonzero().get()),
            size,
            shares: running.as_ref().map(|running| running.shares.clone()),
            disk_used: std::fs::metadata(self.disk_file())
                .ok()
                .map(|metadata| metadata.blocks() * 512),
            uptime_s: running
                .as_ref()
                .map(|running| now.saturating_sub(running.started)),
            address: running.map(|running| running.api),
        })
    }

    /// Stops the machine and removes its options and its disk with all VMs and images. Returns
    /// whether anything existed.
    ///
    /// # Errors
    ///
    /// If QEMU does not end, another process uses the disk, or a file can't be removed.
    pub fn remove(&self) -> Result<bool, MachineError> {
        let _lock = self.lock()?;
        let was = self.stop_locked()? | self.has_disk() | self.size_file().exists();
        for file in [
            self.disk_file(),
            self.disk_file().with_extension("img.tmp"),
            self.size_file(),
            self.console_file(),
            self.servers_log(),
        ] {
            remove(&file)?;
        }
        Ok(was)
    }

    /// Whether it has a data disk, which its first start creates.
    pub fn has_disk(&self) -> bool {
        self.disk_file().exists()
    }

    /// Folders that the running machine shares; none if it does not run.
    pub fn shares(&self) -> Vec<Share> {
        self.running()
            .map(|running| running.shares)
            .unwrap_or_default()
    }

    /// The running machine's agent, which runs programs.
    pub fn agent(&self) -> Option<AgentAddress> {
        let running = self.running()?;
        Some(AgentAddress {
            address: running.agent,
            token: running.token,
        })
    }

    /// Why the machine does not answer, for an error in talking to its node; `None` if it runs.
    pub fn why_it_ended(&self) -> Option<MachineError> {
        let setup = self.setup(&Size::default_for_host());
        if instance::running_pid(&setup.pid_file()).is_some() {
            return match Control::connect(&setup.control_socket())
                .and_then(|mut control| control.status())
                .as_deref()
            {
                Ok("io-error") => Some(MachineError::HostDiskFull {
                    path: self.paths.data.clone(),
                }),
                _ => None,
            };
        }
        Some(MachineError::Died {
            last_console_line: instance::last_console_line(&self.console_file()),
            console: self.console_file(),
        })
    }

    fn running(&self) -> Option<Running> {
        let run = self.run_folder();
        let bytes = std::fs::read(running_file(&run)).ok()?;
        let running: Running = serde_json::from_slice(&bytes).ok()?;
        let pid_file = run.join("pid");
        let pid = instance::running_pid(&pid_file)?.as_raw_nonzero().get();
        (running.format == 1 && running.pid == pid).then_some(running)
    }

    /// The setup of the running machine; its size does not matter.
    pub(crate) fn current_setup(&self) -> Setup {
        self.setup(&Size::default_for_host())
    }

    fn setup(&self, size: &Size) -> Setup {
        self.setup_in(self.run_folder(), size)
    }

    fn setup_in(&self, run: PathBuf, size: &Size) -> Setup {
        let image = self.paths.share.join("machine");
        Setup {
            kernel: match &size.kernel {
                Some(kernel) => kernel.clone(),
                None => image.join("vmlinux"),
            },
            initramfs: image.join("initramfs.cpio"),
            kernel_args: String::new(),
            memory_mib: size.memory_mib,
            cpus: size.cpus,
            accelerator: match size.accelerator {
                Accelerator::TcgInstructionClock => Accelerator::Tcg,
                other => other,
            },
            disk: Some(self.disk_file()),
            run,
            console: self.console_file(),
            daemonize: true,
        }
    }

    /// A lock that is held while the machine is started, stopped or removed.
    fn lock(&self) -> Result<Locked, MachineError> {
        instance::private_folder(&self.data_folder())?;
        instance::private_folder(&self.own_run_folder())?;
        let path = self.data_folder().join("lock");
        locked::open(&path)
            .and_then(Locked::exclusive)
            .map_err(|error| MachineError::file(&path, error))
    }

    /// The lock of the list of forwarded ports.
    pub(crate) fn ports_lock_file(&self) -> PathBuf {
        self.data_folder().join("ports.lock")
    }

    fn data_folder(&self) -> PathBuf {
        self.paths.data.join("machine")
    }

    /// The folder for the sockets of a machine that this process starts.
    fn own_run_folder(&self) -> PathBuf {
        in_run(&self.paths.run)
    }

    /// The run folder of the running machine, else our own. The command that started it
    /// may have had another XDG_RUNTIME_DIR: a login has one, a cron job has none.
    fn run_folder(&self) -> PathBuf {
        let saved =
            std::fs::read(self.run_folder_file()).map(|bytes| OsString::from_vec(bytes).into());
        saved
            .ok()
            .filter(|run: &PathBuf| is_mine_alone(run).unwrap_or(false))
            .map(|run| in_run(&run))
            .filter(|run| instance::running_pid(&run.join("pid")).is_some())
            .unwrap_or_else(|| self.own_run_folder())
    }

    fn save_run_folder(&self) -> Result<(), MachineError> {
        let path = self.run_folder_file();
        jiffy_sys::durable::replace_private(&path, self.paths.run.as_os_str().as_bytes())
            .map_err(|error| MachineError::file(&path, error))
    }

    /// Refuses a disk that another process has locked: a machine that an older Jiffy
    /// started with another run folder, which it did not record.
    fn check_disk_is_free(&self) -> Result<(), MachineError> {
        let path = self.disk_file();
        let deadline = Instant::now() + DISK_LIMIT;
        while instance::is_locked(&path) {
            if Instant::now() > deadline {
                return Err(MachineError::DiskInUse { path });
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    /// The file with the run folder in which the machine was started.
    fn run_folder_file(&self) -> PathBuf {
        self.data_folder().join("run")
    }

    fn disk_file(&self) -> PathBuf {
        self.data_folder().join("disk.img")
    }

    fn size_file(&self) -> PathBuf {
        self.data_folder().join("machine.json")
    }

    /// The log of the servers of shared folders.
    fn servers_log(&self) -> PathBuf {
        self.data_folder().join("folders.log")
    }

    fn console_file(&self) -> PathBuf {
        self.data_folder().join("console.log")
    }
}

/// The machine's folder in a run folder.
fn in_run(run: &Path) -> PathBuf {
    run.join("machine")
}

fn running_file(run: &Path) -> PathBuf {
    run.join("running.json")
}

#[cfg(test)]
mod tests;
