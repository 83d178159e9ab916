//! Disk throughput inside a guest, Jiffy's and QEMU's, on the same file in the same
//! machine; and the cost of creating a root disk.
//!
//! The file is in a tmpfs or, for cold reads, on a RAM disk whose page cache is dropped
//! before each run.

use crate::figure::{Clock, Figure};
use crate::host_files::{GUEST_INITRAMFS, add_config, add_guest_initramfs};
use crate::machine::VMM;
use crate::peers::Peer;
use crate::plan::{Case, Kind, Outcome};
use anyhow::{Result, bail};
use jiffy_machine::image::build::Addition;
use jiffy_wire::vmm;
use std::path::Path;
use std::str::FromStr;

/// Bytes that a pass reads sequentially, and the size of the file without its spare piece.
pub const BYTES: u64 = 16 << 20;
/// Bytes of a sequential read.
pub const PIECE_SEQUENTIAL: usize = 1 << 20;
/// Bytes of a random read.
pub const PIECE_RANDOM: usize = 4096;
/// Random reads in a pass.
pub const RANDOM_READS: usize = 1024;

/// In the machine: the file that stays in the page cache.
pub const WARM_FILE: &str = "/bench/warm.img";
/// In the machine: the RAM disk for cold reads.
pub const COLD_FILE: &str = "/dev/ram0";

/// Instructions to create a root disk of 4 GiB, an empty layer.
pub const CREATE_ROOT: &str = "disk/create-root/instructions";
/// Instructions to create it as a clone of an image.
pub const CLONE_ROOT: &str = "disk/clone-root/instructions";

/// Kind of reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reading {
    /// Random reads of 4 KiB; otherwise sequential reads of 1 MiB.
    pub random: bool,
    /// Whether the file is in the page cache.
    pub warm: bool,
}

impl Reading {
    /// All kinds of reads.
    pub const ALL: [Reading; 4] = [
        Reading::new(false, true),
        Reading::new(true, true),
        Reading::new(false, false),
        Reading::new(true, false),
    ];

    const fn new(random: bool, warm: bool) -> Reading {
        Reading { random, warm }
    }

    /// The case that measures a pass.
    pub fn case(self) -> &'static str {
        match (self.random, self.warm) {
            (false, true) => "disk/seq-read",
            (true, true) => "disk/rand-read",
            (false, false) => "disk/seq-read-cold",
            (true, false) => "disk/rand-read-cold",
        }
    }

    /// The case for the ratio of QEMU's time to Jiffy's.
    pub fn ratio(self) -> &'static str {
        match (self.random, self.warm) {
            (false, true) => "disk/seq-read/ratio",
            (true, true) => "disk/rand-read/ratio",
            (false, false) => "disk/seq-read-cold/ratio",
            (true, false) => "disk/rand-read-cold/ratio",
        }
    }

    fn word(self) -> &'static str {
        match (self.random, self.warm) {
            (false, true) => "seq-warm",
            (true, true) => "rand-warm",
            (false, false) => "seq-cold",
            (true, false) => "rand-cold",
        }
    }

    fn file(self) -> &'static str {
        match self.warm {
            true => WARM_FILE,
            false => COLD_FILE,
        }
    }
}

impl FromStr for Reading {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Reading> {
        let mut all = Reading::ALL.into_iter();
        match all.find(|reading| reading.word() == text) {
            Some(reading) => Ok(reading),
            None => bail!("{text} is no way to read a disk"),
        }
    }
}

/// The case of creating a root disk.
pub fn create_root(runs: u32) -> Case {
    Case {
        name: CREATE_ROOT.into(),
        monitor: "jiffy".into(),
        kind: Kind::CreateRoot { bytes: 4 << 30 },
        runs,
        warm_up: 1,
    }
}

/// The case of creating a root disk as a clone.
pub fn clone_root(runs: u32) -> Case {
    Case {
        name: CLONE_ROOT.into(),
        monitor: "jiffy".into(),
        kind: Kind::CloneRoot { bytes: 4 << 30 },
        runs,
        warm_up: 1,
    }
}

/// Cases of each kind of read for Jiffy and, if it is on PATH, QEMU.
///
/// # Errors
///
/// If a file can't be written in `scratch`.
pub fn cases(
    scratch: &Path,
    base: &vmm::VmmConfig,
    peers: &[Peer],
    files: &mut Vec<Addition>,
    runs: u32,
) -> Result<Vec<Case>> {
    add_guest_initramfs(scratch, files)?;
    let mut cases = Vec::new();
    for reading in Reading::ALL {
        let mut config = base.clone();
        config.boot.initrd = Some(GUEST_INITRAMFS.into());
        config.boot.command_line += &format!(" disk_read={}", reading.word());
        config.disks = vec![vmm::Disk {
            path: reading.file().into(),
            read_only: true,
            ..vmm::Disk::default()
        }];
        let name = format!("reader-{}.json", reading.word());
        let guest = add_config(scratch, &name, &config, files)?;
        let ours = [VMM, "run", "--config", &guest];
        let case = |monitor: &str, argv: Vec<String>| Case {
            name: reading.case().into(),
            monitor: monitor.into(),
            kind: Kind::Disk {
                argv,
                warm: reading.warm,
            },
            // Each boots a guest, so no warm-up is needed.
            runs: runs.min(3),
            warm_up: 0,
        };
        cases.push(case("jiffy", ours.map(String::from).into()));
        if peers.contains(&Peer::Qemu) && Peer::Qemu.version().is_some() {
            cases.push(case(Peer::Qemu.name(), qemu(base, reading)));
        }
    }
    Ok(cases)
}

/// QEMU's microvm with a raw virtio-blk-device (modern). All else has defaults: page cache, thread
/// pool.
fn qemu(base: &vmm::VmmConfig, reading: Reading) -> Vec<String> {
    let (mut argv, _) = Peer::Qemu.boot(&crate::peers::Boot {
        kernel: &base.boot.kernel.display().to_string(),
        initramfs: GUEST_INITRAMFS,
        command_line: &format!("{} disk_read={}", base.boot.command_line, reading.word()),
        ram_mib: u64::from(base.memory.size_mib),
        tap: None,
        config: "",
    });
    let drive = format!(
        "if=none,id=disk,format=raw,readonly=on,file={}",
        reading.file()
    );
    let more = [
        // Otherwise ACPI announces the disk, and the kernel has no ACPI.
        "-machine",
        "acpi=off",
        "-global",
        "virtio-mmio.force-legacy=false",
        "-drive",
        &drive,
        "-device",
        "virtio-blk-device,drive=disk",
    ];
    argv.extend(more.map(String::from));
    argv
}

/// Whether this is a case of disk reads. Such a case is compared with QEMU, but not checked.
pub fn is_reading(case: &str) -> bool {
    Reading::ALL
        .iter()
        .any(|reading| [reading.case(), reading.ratio()].contains(&case))
}

/// Ratios of QEMU's times to Jiffy's, if QEMU was measured.
pub fn ratios(outcomes: &[Outcome]) -> Vec<Figure> {
    let median = |reading: Reading, monitor: &str| {
        let found = outcomes
            .iter()
            .find(|outcome| outcome.name == reading.case() && outcome.monitor == monitor)?;
        let figure = Figure::of_times("", "", Clock::Instructions, &found.samples)?;
        Some(figure.median)
    };
    let ratio = |reading: Reading| {
        let (ours, theirs) = (
            median(reading, "jiffy")?,
            median(reading, Peer::Qemu.name())?,
        );
        Figure::of(
            reading.ratio(),
            "jiffy",
            Clock::Count,
            "times",
            vec![theirs / ours],
        )
    };
    Reading::ALL.into_iter().filter_map(ratio).collect()
}
