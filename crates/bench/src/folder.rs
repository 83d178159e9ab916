//! A shared folder inside a guest: Jiffy's, and QEMU's with virtiofsd, in the same machine.
//!
//! The folder is in a tmpfs, and the guests have Jiffy's kernel, because the neutral one has no
//! virtio-fs.

use crate::host_files::{addition, guest_initramfs, with_libraries};
use crate::peers::{Boot, Peer};
use crate::plan::{Case, FolderServer, Kind};
use anyhow::{Result, bail};
use jiffy_machine::image::build::Addition;
use jiffy_sys::programs::on_path;
use jiffy_wire::vmm;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// By which guests mount it.
pub const TAG: &str = "bench";
/// Kernel parameter with the [`Work`]; it arrives in the environment of PID 1.
pub const PARAMETER: &str = "folder_work";

/// In the machine: the folder.
pub const FOLDER: &str = "/bench/shared";
/// In the machine: the socket of QEMU's server.
pub const SOCKET: &str = "/tmp/bench-virtiofsd.sock";
/// Number of the socket of Jiffy's server, which the VMM inherits.
pub const SERVER_DESCRIPTOR: i32 = 101;
/// Number of the listening socket that virtiofsd inherits.
pub const LISTEN_DESCRIPTOR: i32 = 102;

/// Name of the folder's part for what is measured.
pub const MEASURED: Part = Part {
    name: "measured",
    bytes: 16 << 20,
    files: 1000,
};
/// The part for the same work in little, before.
pub const WARM_UP: Part = Part {
    name: "warm-up",
    bytes: 1 << 20,
    files: 10,
};
/// Bytes of a read or write.
pub const PIECE: usize = 1 << 20;
/// Name of the file with a part's bytes.
pub const DATA: &str = "data";
/// Name of the folder with a part's files.
pub const FILES: &str = "files";

const INITRAMFS: &str = "/bench/sharer.cpio";
const SERVER: &str = "/bench/virtiofsd";
const RAM_MIB: u64 = 128;

/// A part of the folder: an amount of work.
#[derive(Debug, Clone, Copy)]
pub struct Part {
    /// Its name.
    pub name: &'static str,
    /// Bytes of the file that is read or written.
    pub bytes: u64,
    /// Number of empty files for all other work.
    pub files: u32,
}

/// What a guest does in the folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Work {
    /// Writes a new file.
    Write,
    /// Reads a file that it has not read before.
    Read,
    /// Creates and closes files.
    Create,
    /// Asks for the attributes of files that it has not seen before.
    Stat,
    /// Lists a folder.
    List,
    /// Removes files that it has not seen before.
    Remove,
}

impl Work {
    /// All kinds.
    pub const ALL: [Work; 6] = [
        Work::Write,
        Work::Read,
        Work::Create,
        Work::Stat,
        Work::List,
        Work::Remove,
    ];

    /// The case that measures it.
    pub fn case(self) -> &'static str {
        match self {
            Work::Write => "folder/write/instructions-per-mib",
            Work::Read => "folder/read/instructions-per-mib",
            Work::Create => "folder/create/instructions-per-file",
            Work::Stat => "folder/stat/instructions-per-file",
            Work::List => "folder/list/instructions-per-file",
            Work::Remove => "folder/remove/instructions-per-file",
        }
    }

    fn word(self) -> &'static str {
        match self {
            Work::Write => "write",
            Work::Read => "read",
            Work::Create => "create",
            Work::Stat => "stat",
            Work::List => "list",
            Work::Remove => "remove",
        }
    }

    /// The number of units by which a run's instructions are divided.
    pub fn units(self) -> u64 {
        match self {
            Work::Write | Work::Read => MEASURED.bytes >> 20,
            _ => MEASURED.files.into(),
        }
    }
}

impl FromStr for Work {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Work> {
        let mut all = Work::ALL.into_iter();
        match all.find(|work| work.word() == text) {
            Some(work) => Ok(work),
            None => bail!("{text} is no work in a folder"),
        }
    }
}

/// Whether this is a case of a shared folder. Such a case is compared with QEMU, but not checked.
pub fn is_work(case: &str) -> bool {
    Work::ALL.iter().any(|work| work.case() == case)
}

/// Cases of each kind of work for Jiffy and, if this host has it and its virtiofsd, QEMU. `base` is
/// a VM with Jiffy's kernel.
pub fn cases(
    scratch: &Path,
    base: &vmm::VmmConfig,
    peers: &[Peer],
    files: &mut Vec<Addition>,
    runs: u32,
) -> Result<Vec<Case>> {
    let sharer = scratch.join("sharer.cpio");
    std::fs::write(&sharer, guest_initramfs()?)?;
    files.push(addition(sharer, INITRAMFS));
    let qemus = virtiofsd().filter(|_| peers.contains(&Peer::Qemu));
    let qemus = qemus.filter(|_| Peer::Qemu.version().is_some());
    if let Some(server) = &qemus {
        files.extend(with_libraries(server, SERVER)?);
    }
    let mut cases = Vec::new();
    for work in Work::ALL {
        let command_line = format!("{} {PARAMETER}={}", base.boot.command_line, work.word());
        let mut config = base.clone();
        config.boot.initrd = Some(INITRAMFS.into());
        config.boot.command_line = command_line.clone();
        config.folders = vec![vmm::Folder {
            tag: TAG.into(),
            server: Some(SERVER_DESCRIPTOR),
        }];
        let name = format!("sharer-{}.json", work.word());
        let guest = format!("/bench/{name}");
        let host = scratch.join(&name);
        std::fs::write(&host, serde_json::to_vec(&config)?)?;
        let ours = ["/lib/jiffy/jiffy-vmm", "run", "--config", &guest];
        let ours = ours.map(String::from).into();
        files.push(addition(host, &guest));
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
        initramfs: INITRAMFS,
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_of_work_has_a_case_and_a_word_of_its_own() {
        let cases: std::collections::BTreeSet<_> = Work::ALL.map(Work::case).into();
        assert_eq!(cases.len(), Work::ALL.len());
        for work in Work::ALL {
            assert_eq!(work.word().parse::<Work>().unwrap(), work);
        }
        assert!("rest".parse::<Work>().is_err());
    }
}
