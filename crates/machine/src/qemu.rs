//! QEMU's command line.

use crate::error::MachineError;
use crate::options::Accelerator;
use crate::protocol::{
    AGENT_PORT, API_PORT, AUTHORITIES_FW_CFG_NAME, READY_PORT, TOKEN_FW_CFG_NAME,
};
use crate::shares;
use jiffy_sys::programs::on_path;
use std::ffi::{OsStr, OsString};
use std::os::fd::RawFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// QEMU's configuration.
#[derive(Debug, Clone)]
pub struct Setup {
    /// An ELF kernel with a PVH note.
    pub kernel: PathBuf,
    /// Its initramfs.
    pub initramfs: PathBuf,
    /// Further kernel parameters.
    pub kernel_args: String,
    /// RAM in MiB.
    pub memory_mib: u32,
    /// CPUs.
    pub cpus: u8,
    /// Accelerator.
    pub accelerator: Accelerator,
    /// The data disk (`/dev/vda`).
    pub disk: Option<PathBuf>,
    /// Folder for sockets, pid, configuration and token.
    pub run: PathBuf,
    /// File to which its console is written.
    pub console: PathBuf,
    /// Whether QEMU runs as a daemon, which outlives this process.
    pub daemonize: bool,
}

impl Setup {
    /// QEMU's control socket.
    pub fn control_socket(&self) -> PathBuf {
        self.run.join("qmp.sock")
    }

    /// The host's side of the readiness port.
    pub fn ready_socket(&self) -> PathBuf {
        self.run.join("ready.sock")
    }

    /// QEMU locks this file while it runs.
    pub fn pid_file(&self) -> PathBuf {
        self.run.join("pid")
    }

    /// The guest configuration that QEMU reads.
    pub fn config_file(&self) -> PathBuf {
        self.run.join("config.json")
    }

    /// The token that QEMU reads.
    pub fn token_file(&self) -> PathBuf {
        self.run.join("token")
    }

    /// QEMU's arguments. `shares` are the sockets of shared folders' servers, which QEMU inherits.
    pub fn arguments(&self, shares: &[RawFd]) -> Vec<OsString> {
        let mut line = Line(Vec::new());
        // microvm has no PCI and no option ROMs; it is the smallest machine with ACPI. The only
        // timers are the CPU's, so the kernel gets their frequency.
        line.add(["-machine", "microvm,rtc=on,pit=off,pic=off,usb=off"]);
        line.add(["-no-user-config", "-nodefaults", "-display", "none"]);
        line.add(["-name", "jiffy-machine", "-no-reboot"]);
        line.accelerator(self.accelerator);
        line.add(["-smp", &self.cpus.to_string()]);
        line.add(["-m", &format!("{}M", self.memory_mib)]);
        line.add(["-kernel"]).path("", &self.kernel);
        line.add(["-initrd"]).path("", &self.initramfs);
        line.add(["-append", &self.command_line()]);
        line.add(["-chardev"])
            .path("file,id=console,path=", &self.console);
        line.add(["-serial", "chardev:console"]);
        line.add(["-chardev"]).path(
            "socket,id=qmp,server=on,wait=off,path=",
            &self.control_socket(),
        );
        line.add(["-mon", "chardev=qmp,mode=control"]);
        line.add(["-device", "virtio-serial-device"]);
        line.add(["-chardev"]).path(
            "socket,id=ready,server=on,wait=off,path=",
            &self.ready_socket(),
        );
        line.add([
            "-device",
            &format!("virtserialport,chardev=ready,name={READY_PORT}"),
        ]);
        line.shares(shares);
        // The machine's node and pager reach everything that the user reaches, because images come
        // from registries; VMs do as well, within their rules. The host's loopback reaches two
        // ports of the machine; the ports that VMs publish are added later.
        line.add([
            "-netdev",
            &format!(
                "user,id=net,ipv6=off,hostfwd=tcp:127.0.0.1:0-:{API_PORT},\
                 hostfwd=tcp:127.0.0.1:0-:{AGENT_PORT}"
            ),
        ]);
        line.add(["-device", "virtio-net-device,netdev=net"]);
        if let Some(disk) = &self.disk {
            line.add(["-drive"]).path(
                "id=data,if=none,format=raw,discard=unmap,detect-zeroes=off,cache=writeback,file=",
                disk,
            );
            line.add(["-device", "virtio-blk-device,drive=data,discard=on"]);
        }
        line.add(["-fw_cfg"])
            .path("name=opt/jiffy/config,file=", &self.config_file());
        line.add(["-fw_cfg"]).path(
            &format!("name={TOKEN_FW_CFG_NAME},file="),
            &self.token_file(),
        );
        if let Some(bundle) = authorities() {
            line.add(["-fw_cfg"])
                .path(&format!("name={AUTHORITIES_FW_CFG_NAME},file="), bundle);
        }
        line.add(["-pidfile"]).path("", &self.pid_file());
        if self.daemonize {
            line.add(["-daemonize"]);
        }
        line.0
    }

    /// The kernel's parameters.
    ///
    /// * `tsc_early_khz`, `tsc=reliable`: there is no other timer to calibrate with.
    /// * `mitigations=off`: no untrusted program runs beside the guest kernels, and software
    ///   emulation does not speculate.
    /// * `noautogroup`: autogroup would give each session the same share of a processor,
    ///   regardless of priorities, and each VMM is a session.
    /// * `initcall_blacklist`: self-tests and key rings that only the check of module signatures
    ///   needs; together they take a third of the boot.
    pub fn command_line(&self) -> String {
        let mut line = String::from(
            "console=ttyS0 quiet panic=-1 mitigations=off cryptomgr.notests \
             random.trust_cpu=on noautogroup \
             initcall_blacklist=jent_mod_init,load_system_certificate_list,init_encrypted",
        );
        match self.accelerator {
            Accelerator::Tcg => {
                line.push_str(&format!(" tsc=reliable tsc_early_khz={}", host_tsc_khz()));
            }
            Accelerator::TcgInstructionClock => {
                line.push_str(" tsc=reliable tsc_early_khz=1000000");
            }
            Accelerator::Kvm => {}
        }
        if !self.kernel_args.is_empty() {
            line.push(' ');
            line.push_str(&self.kernel_args);
        }
        line
    }
}

struct Line(Vec<OsString>);

impl Line {
    fn add<const N: usize>(&mut self, arguments: [&str; N]) -> &mut Line {
        self.0.extend(arguments.iter().map(OsString::from));
        self
    }

    /// Adds one argument: `prefix` and a path. In a list of options (with a prefix) commas are
    /// doubled.
    fn path(&mut self, prefix: &str, path: &Path) -> &mut Line {
        let mut argument = OsString::from(prefix);
        if prefix.is_empty() {
            argument.push(path);
        } else {
            argument.push(escape_commas(path.as_os_str()));
        }
        self.0.push(argument);
        self
    }

    /// Adds a port for each socket of a shared folder's server.
    fn shares(&mut self, sockets: &[RawFd]) {
        for (number, socket) in sockets.iter().enumerate() {
            let port = shares::port(number);
            let chardev = format!("share{number}");
            self.add(["-chardev", &format!("socket,id={chardev},fd={socket}")]);
            let device = format!("virtserialport,chardev={chardev},name={port}");
            self.add(["-device", &device]);
        }
    }

    fn accelerator(&mut self, accelerator: Accelerator) {
        match accelerator {
            // With one thread per CPU a kernel that patches its static branches races with
            // translated code of the other CPUs. Without ERMS and FSRM the kernel copies by words,
            // because TCG runs `rep movsb` byte by byte. LA57 would add a useless level of page
            // tables.
            Accelerator::Tcg => {
                self.add(["-accel", "tcg,thread=single"]);
                self.add(["-cpu", "max,-erms,-fsrm,-la57"]);
            }
            Accelerator::TcgInstructionClock => {
                self.add(["-accel", "tcg,thread=single"]);
                self.add(["-icount", "shift=0,sleep=off"]);
                self.add(["-cpu", "max,-erms,-fsrm,-la57"]);
            }
            Accelerator::Kvm => {
                self.add(["-accel", "kvm", "-cpu", "host"]);
            }
        }
    }
}

fn escape_commas(text: &OsStr) -> OsString {
    use std::os::unix::ffi::{OsStrExt, OsStringExt};
    let mut bytes = Vec::new();
    for byte in text.as_bytes() {
        bytes.push(*byte);
        if *byte == b',' {
            bytes.push(b',');
        }
    }
    OsString::from_vec(bytes)
}

/// The file with the certificate authorities that the host trusts.
pub fn authorities() -> Option<&'static Path> {
    const BUNDLES: [&str; 3] = [
        "/etc/ssl/certs/ca-certificates.crt",
        "/etc/pki/tls/certs/ca-bundle.crt",
        "/etc/ssl/ca-bundle.pem",
    ];
    BUNDLES.iter().map(Path::new).find(|path| path.is_file())
}

/// The path of QEMU.
///
/// # Errors
///
/// If it is not on `PATH`.
pub fn find() -> Result<PathBuf, MachineError> {
    on_path("qemu-system-x86_64").ok_or(MachineError::NoQemu)
}

/// Frequency of the host's time stamp counter, which an emulated CPU has as well, in kHz. Measured
/// over 10 ms; accurate to a few parts in a million.
#[allow(unsafe_code)]
pub fn host_tsc_khz() -> u64 {
    // SAFETY: rdtsc exists on every x86-64 processor and only reads a counter.
    let counter = || unsafe { core::arch::x86_64::_rdtsc() };
    let start = Instant::now();
    let first = counter();
    while start.elapsed() < Duration::from_millis(10) {
        std::hint::spin_loop();
    }
    let nanoseconds = start.elapsed().as_nanos() as u64;
    counter().saturating_sub(first) * 1_000_000 / nanoseconds.max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn setup() -> Setup {
        Setup {
            kernel: "/k/vmlinux".into(),
            initramfs: "/k/initramfs.cpio".into(),
            kernel_args: "extra=1".into(),
            memory_mib: 2048,
            cpus: 2,
            accelerator: Accelerator::Tcg,
            disk: Some("/data/a,b.img".into()),
            run: "/run/jiffy/machine".into(),
            console: "/data/console.log".into(),
            daemonize: true,
        }
    }

    #[test]
    fn commas_in_paths_do_not_become_options() {
        let line = setup().arguments(&[]);
        assert!(
            line.iter()
                .any(|argument| argument.to_string_lossy().ends_with("file=/data/a,,b.img")),
            "{line:?}"
        );
    }

    #[test]
    fn each_share_has_a_port_on_an_inherited_socket() {
        let line = setup().arguments(&[7, 9]);
        let options = |before: &str| -> Vec<String> {
            let pairs = line.windows(2).filter(|pair| pair[0] == before);
            let options = pairs.map(|pair| pair[1].to_string_lossy().into_owned());
            options.filter(|option| option.contains("share")).collect()
        };
        assert_eq!(
            options("-chardev"),
            ["socket,id=share0,fd=7", "socket,id=share1,fd=9"]
        );
        assert_eq!(
            options("-device"),
            [
                "virtserialport,chardev=share0,name=org.jiffy.share.0",
                "virtserialport,chardev=share1,name=org.jiffy.share.1"
            ]
        );
        let none = setup().arguments(&[]);
        assert!(
            !none
                .iter()
                .any(|one| one.to_string_lossy().contains("share"))
        );
    }

    #[test]
    fn the_token_is_not_on_the_command_line() {
        let line = setup().arguments(&[]);
        assert!(line.contains(&"name=opt/jiffy/token,file=/run/jiffy/machine/token".into()));
    }

    #[test]
    fn the_instruction_clock_uses_a_fixed_tsc_frequency() {
        let mut setup = setup();
        setup.accelerator = Accelerator::TcgInstructionClock;
        assert!(
            setup
                .command_line()
                .contains("tsc_early_khz=1000000 extra=1")
        );
        assert!(setup.arguments(&[]).contains(&"shift=0,sleep=off".into()));
    }

    #[test]
    fn the_measured_tsc_frequency_is_plausible() {
        let khz = host_tsc_khz();
        assert!((100_000..20_000_000).contains(&khz), "{khz} kHz");
    }
}
