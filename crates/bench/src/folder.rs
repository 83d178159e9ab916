//! A shared folder inside a guest: Jiffy's, and QEMU's with virtiofsd, in the same machine.
//!
//! The folder is in a tmpfs, and the guests have Jiffy's kernel, because the neutral one has no
//! virtio-fs.

use crate::host_files::{GUEST_INITRAMFS, add_config, add_guest_initramfs, with_libraries};
use crate::machine::VMM;
use crate::peers::{Boot, Peer};
use crate::plan::{Case, FolderServer, Kind};
use crate::work::{PARAMETER, TAG, Work};
use anyhow::Result;
use jiffy_machine::image::build::Addition;
use jiffy_sys::programs::on_path;
use jiffy_wire::vmm;
use std::path::{Path, PathBuf};

/// In the machine: the folder.
pub const FOLDER: &str = "/bench/shared";
/// In the machine: the socket of QEMU's server.
pub const SOCKET: &str = "/tmp/bench-virtiofsd.sock";
/// Number of the socket of Jiffy's server, which the VMM inherits.
pub const SERVER_DESCRIPTOR: i32 = 101;
/// Number of the listening socket that virtiofsd inherits.
pub const LISTEN_DESCRIPTOR: i32 = 102;

const SERVER: &str = "/bench/virtiofsd";
const RAM_MIB: u64 = 128;

/// Whether this is a case of a shared folder. Such a case is compared with QEMU, but not checked.
pub fn is_work(case: &str) -> bool {
    Work::ALL.iter().any(|work| work.case() == case)
}

/// Cases of each kind of work for Jiffy and, if this host has it and its virtiofsd, QEMU. `base` is
/// a VM with Jiffy's kernel.
///
/// # Errors
///
/// If a file can't be written in `scratch`, or a library of virtiofsd is missing.
pub fn cases(
    scratch: &Path,
    base: &vmm::VmmConfig,
    peers: &[Peer],
    files: &mut Vec<Addition>,
    runs: u32,
) -> Result<Vec<Case>> {
    add_guest_initramfs(scratch, files)?;
    let qemus = virtiofsd().filter(|_| peers.contains(&Peer::Qemu));
    let qemus = qemus.filter(|_| Peer::Qemu.version().is_some());
    if let Some(server) = &qemus {
        files.extend(with_libraries(server, SERVER)?);
    }
    let mut cases = Vec::new();
    for work in Work::ALL {
        let command_line = format!("{} {PARAMETER}={}", base.boot.command_line, work.word());
        let mut config = base.clone();
        config.boot.initrd = Some(GUEST_INITRAMFS.into());
        config.boot.command_line = command_line.clone();
        config.folders = vec![vmm::Folder {
            tag: TAG.into(),
            server: Some(SERVER_DESCRIPTOR),
        }];
        let name = format!("sharer-{}.json", work.word());
        let guest = add_config(scratch, &name, &config, files)?;
        let ours = [VMM, "run", "--config", &guest].map(String::from).into();
        let case = |monitor: &str, argv: Vec<String>, server: FolderServer| Case {
            name: work.case().into(),
            monitor: monitor.into(),
            kind: Kind::Folder { argv, server, work },
            // Each boots a guest, and warms up in it.
            runs: runs.min(3),
            warm_up: 0,
        };
        cases.push(case("jiffy", ours, FolderServer::Jiffy));
        if qemus.is_some() {
            let argv = qemu(&base.boot, &command_line);
            let server = FolderServer::Virtiofsd(virtiofsd_command());
            cases.push(case(Peer::Qemu.name(), argv, server));
        }
    }
    Ok(cases)
}

/// virtiofsd of this host: on PATH, or where Debian's QEMU has it.
fn virtiofsd() -> Option<PathBuf> {
    let folders =
        ["/usr/libexec", "/usr/lib/qemu"].map(|folder| Path::new(folder).join("virtiofsd"));
    on_path("virtiofsd").or_else(|| folders.into_iter().find(|path| path.is_file()))
}

/// All else has defaults, such as caching for a second. The default sandbox calls pivot_root(2),
/// which the machine's initial file system does not support.
fn virtiofsd_command() -> Vec<String> {
    [
        SERVER.to_owned(),
        format!("--fd={LISTEN_DESCRIPTOR}"),
        "-o".to_owned(),
        format!("source={FOLDER}"),
        "-o".to_owned(),
        "sandbox=chroot".to_owned(),
    ]
    .into()
}

/// QEMU's microvm, whose RAM it shares with virtiofsd.
fn qemu(boot: &vmm::Boot, command_line: &str) -> Vec<String> {
    let (mut argv, _) = Peer::Qemu.boot(&Boot {
        kernel: &boot.kernel.display().to_string(),
        initramfs: GUEST_INITRAMFS,
        command_line,
        ram_mib: RAM_MIB,
        tap: None,
        config: "",
    });
    let more = [
        // Otherwise ACPI announces the device, and the kernel has no ACPI.
        "-machine",
        "acpi=off,memory-backend=ram",
        "-global",
        "virtio-mmio.force-legacy=false",
        "-object",
        &format!("memory-backend-memfd,id=ram,share=on,size={RAM_MIB}M"),
        "-chardev",
        &format!("socket,id=folder,path={SOCKET}"),
        "-device",
        &format!("vhost-user-fs-device,chardev=folder,tag={TAG}"),
    ];
    argv.extend(more.map(String::from));
    argv
}
