//! Parsers of option values.

use super::TimelineFormat;
use clap::ValueEnum;
use jiffy_wire::api::{IdleAction, VolumeUse};
use jiffy_wire::signal;
use jiffy_wire::text::parse_size;
use jiffy_wire::vmm::{DiskLimit, NetLimit, PageSize};
use std::num::NonZeroU64;
use std::path::PathBuf;

/// When VMs run in the machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum MachineUse {
    Auto,
    Always,
    Never,
}

/// Sizes of huge pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum HugePages {
    #[value(name = "2M")]
    M2,
    #[value(name = "1G")]
    G1,
}

impl From<HugePages> for PageSize {
    fn from(pages: HugePages) -> PageSize {
        match pages {
            HugePages::M2 => PageSize::Huge2M,
            HugePages::G1 => PageSize::Huge1G,
        }
    }
}

/// What happens to a VM that is idle.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum IdleActionChoice {
    Hibernate,
    Stop,
}

impl From<IdleActionChoice> for IdleAction {
    fn from(choice: IdleActionChoice) -> IdleAction {
        match choice {
            IdleActionChoice::Hibernate => IdleAction::Hibernate,
            IdleActionChoice::Stop => IdleAction::Stop,
        }
    }
}

/// Parses a time: a whole number followed by `s`, `m`, `h` or `d`, or by nothing for seconds.
/// Returns seconds.
///
/// # Errors
///
/// If it is no such time, or does not fit in 32 bits. The error is a sentence, as in all parsers
/// here.
pub fn seconds(text: &str) -> Result<u32, String> {
    let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
    let unit = match &text[digits.len()..] {
        "" | "s" => Some(1),
        "m" => Some(60),
        "h" => Some(3600),
        "d" => Some(86_400),
        _ => None,
    };
    // `parse` would accept a sign.
    let is_number = digits.bytes().all(|byte| byte.is_ascii_digit());
    let number: Option<u32> = digits.parse().ok().filter(|_| is_number);
    number
        .zip(unit)
        .and_then(|(number, unit)| number.checked_mul(unit))
        .ok_or_else(|| format!("'{text}' is not a time; write 90s, 5m, 2h or 1d"))
}

/// A kernel of the node, or a file of the user's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KernelChoice {
    /// A kernel that `jiffy kernel list` shows.
    Name(String),
    /// A file on this host.
    File(PathBuf),
}

impl From<&str> for KernelChoice {
    fn from(text: &str) -> KernelChoice {
        if text.contains('/') {
            KernelChoice::File(text.into())
        } else {
            KernelChoice::Name(text.to_owned())
        }
    }
}

/// A volume to attach.
pub type DiskUse = VolumeUse;

/// Parses `256`, `256M`, `2G` or `1T`; returns MiB.
///
/// # Errors
///
/// If it is no such size, 0, or no whole number of MiB.
pub fn mebibytes(text: &str) -> Result<u64, String> {
    const MIB: u64 = 1 << 20;
    match parse_size(text, MIB) {
        Some(bytes) if bytes > 0 && bytes % MIB == 0 => Ok(bytes / MIB),
        _ => Err(format!("'{text}' is not a size; write 256, 256M or 2G")),
    }
}

/// Parses a rate per second: `50`, `50K`, `50M`, `2G`.
fn rate(text: &str) -> Result<NonZeroU64, String> {
    parse_size(text, 1)
        .and_then(NonZeroU64::new)
        .ok_or_else(|| format!("'{text}' is not a rate; write 1000, 500K, 50M or 2G"))
}

/// Parses `bps=50M` or `iops=1000` into `limit`; false if it is neither.
fn take_limit(limit: &mut DiskLimit, option: &str) -> Result<bool, String> {
    let slot = match option.split_once('=') {
        Some(("bps", value)) => (&mut limit.bytes_per_second, value),
        Some(("iops", value)) => (&mut limit.operations_per_second, value),
        _ => return Ok(false),
    };
    *slot.0 = Some(rate(slot.1)?);
    Ok(true)
}

/// Parses `bps=50M`, `iops=1000`, or both separated by a comma.
///
/// # Errors
///
/// If it has another option, or a rate is not a positive number.
pub fn disk_limit(text: &str) -> Result<DiskLimit, String> {
    let mut limit = DiskLimit::default();
    for option in text.split(',') {
        if !take_limit(&mut limit, option)? {
            return Err(format!(
                "'{option}' is not a rate limit; write bps=50M (bytes per second) or iops=1000 (operations per second)"
            ));
        }
    }
    Ok(limit)
}

/// Parses limits such as `bps=10M,burst=1M,pps=5000,packet-burst=100`: any of them.
///
/// # Errors
///
/// If it has another option, a rate is not a positive number, or a burst lacks its rate.
pub fn network_limit(text: &str) -> Result<NetLimit, String> {
    let mut limit = NetLimit::default();
    for option in text.split(',') {
        let (slot, value) = match option.split_once('=') {
            Some(("bps", value)) => (&mut limit.bytes_per_second, value),
            Some(("pps", value)) => (&mut limit.packets_per_second, value),
            Some(("burst", value)) => (&mut limit.bytes_burst, value),
            Some(("packet-burst", value)) => (&mut limit.packets_burst, value),
            _ => {
                return Err(format!(
                    "'{option}' is not a rate limit; write bps=10M (bytes per second) or pps=5000 (packets per second), with burst=1M (bytes) or packet-burst=100"
                ));
            }
        };
        *slot = Some(rate(value)?);
    }
    for (burst, of, name, rate) in [
        (limit.bytes_burst, limit.bytes_per_second, "burst", "bps"),
        (
            limit.packets_burst,
            limit.packets_per_second,
            "packet-burst",
            "pps",
        ),
    ] {
        if burst.is_some() && of.is_none() {
            return Err(format!("{name}= is the burst of {rate}=, which is missing"));
        }
    }
    Ok(limit)
}

/// Parses a new limit with `parse`, or `none`.
///
/// # Errors
///
/// If `parse` fails.
pub fn new_limit<T: Default>(
    text: &str,
    parse: impl Fn(&str) -> Result<T, String>,
) -> Result<T, String> {
    match text {
        "none" => Ok(T::default()),
        limit => parse(limit),
    }
}

/// Parses a volume's name, and after a comma its new limit.
///
/// # Errors
///
/// If the name is empty, or the limit is missing or wrong (see [`disk_limit`]).
pub fn volume_limit(text: &str) -> Result<(String, DiskLimit), String> {
    match text.split_once(',') {
        Some((name, limit)) if !name.is_empty() => {
            Ok((name.to_owned(), new_limit(limit, disk_limit)?))
        }
        _ => Err(format!(
            "'{text}' is not a volume and its limit; write NAME,bps=50M or NAME,none"
        )),
    }
}

/// Parses `NAME`, `NAME:SIZE`, `NAME:ro` or `NAME:SIZE:ro`, with options after commas.
///
/// # Errors
///
/// If the name is empty, a size or a rate is wrong, or an option is unknown.
pub fn disk_use(text: &str) -> Result<DiskUse, String> {
    let mut options = text.split(',');
    let mut disk = volume_use(options.next().unwrap_or_default())?;
    for option in options {
        if let Some(path) = option.strip_prefix("mount=") {
            disk.mount = Some(path.to_owned());
        } else if !take_limit(&mut disk.limit, option)? {
            return Err(format!(
                "'{option}' is not an option of a disk; write mount=PATH, bps=50M or iops=1000"
            ));
        }
    }
    Ok(disk)
}

fn volume_use(text: &str) -> Result<DiskUse, String> {
    let mut parts = text.split(':');
    let name = parts.next().unwrap_or_default();
    if name.is_empty() {
        return Err("a disk needs a name: NAME[:SIZE][:ro]".to_owned());
    }
    let mut disk = VolumeUse {
        name: name.to_owned(),
        ..VolumeUse::default()
    };
    for part in parts {
        match part {
            "ro" => disk.read_only = true,
            "rw" => disk.read_only = false,
            _ if disk.size_mib.is_none() && !disk.read_only => {
                disk.size_mib = Some(mebibytes(part)?);
            }
            _ => return Err(format!("'{text}' is not a disk; write NAME[:SIZE][:ro]")),
        }
    }
    Ok(disk)
}

/// The source or the target of `jiffy cp`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// A path on this host.
    Here(PathBuf),
    /// A path in a VM.
    Vm { vm: String, path: String },
    /// A tar on stdin or stdout.
    Tar,
}

/// Parses `-`, `VM:PATH` or a path; a colon after a slash is part of a path.
///
/// # Errors
///
/// If it is empty, or has no path after the VM's name.
pub fn place(text: &str) -> Result<Place, String> {
    if text == "-" {
        return Ok(Place::Tar);
    }
    if text.is_empty() {
        return Err("a path can't be empty".to_owned());
    }
    match text.split_once(':') {
        Some((vm, path)) if !vm.contains('/') && !vm.starts_with('.') && !vm.is_empty() => {
            if path.is_empty() {
                return Err(format!(
                    "'{text}' names no path in the VM; write {vm}:/path"
                ));
            }
            Ok(Place::Vm {
                vm: vm.to_owned(),
                path: path.to_owned(),
            })
        }
        _ => Ok(Place::Here(text.into())),
    }
}

/// A timeline in detail.
const DEEP: &str = "deep";

/// The format and the target of `run --timeline`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TimelineOutput {
    /// The format.
    pub format: TimelineFormat,
    /// The file; `None` for stderr.
    pub file: Option<PathBuf>,
    /// Whether it shows what the VMM's threads did, and the exits.
    pub deep: bool,
}

/// Parses the value of `run --timeline`: `deep`, `deep:FILE`, or what [`timeline_output`] parses.
///
/// # Errors
///
/// If the format is unknown, or there is no file after the colon.
pub fn run_timeline_output(text: &str) -> Result<TimelineOutput, String> {
    let output = |format, file| TimelineOutput {
        format,
        file,
        deep: true,
    };
    match text.split_once(':') {
        None if text == DEEP => Ok(output(TimelineFormat::Table, None)),
        Some((DEEP, "")) => Err(format!("'{text}' names no file after the colon")),
        Some((DEEP, file)) => Ok(output(TimelineFormat::Perfetto, Some(file.into()))),
        _ => timeline_output(text),
    }
}

/// Parses `FORMAT` or `FORMAT:FILE`.
///
/// # Errors
///
/// If the format is unknown, or there is no file after the colon.
pub fn timeline_output(text: &str) -> Result<TimelineOutput, String> {
    let (format, file) = match text.split_once(':') {
        Some((_, "")) => return Err(format!("'{text}' names no file after the colon")),
        Some((format, file)) => (format, Some(PathBuf::from(file))),
        None => (text, None),
    };
    let format = TimelineFormat::from_str(format, true).map_err(|_| {
        format!("'{format}' is not a format of a timeline; write table, json or perfetto")
    })?;
    Ok(TimelineOutput {
        format,
        file,
        deep: false,
    })
}

/// Parses `TERM`, `SIGTERM`, `sigterm` or `15`.
///
/// # Errors
///
/// If there is no such signal.
pub fn signal_number(text: &str) -> Result<i32, String> {
    signal::number(text).ok_or_else(|| match text.parse::<i32>() {
        Ok(number) => format!(
            "there is no signal {number}; write a number from 1 to {}",
            signal::MAX
        ),
        Err(_) => format!("there is no signal named '{text}'"),
    })
}
