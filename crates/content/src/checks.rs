//! Limits of a VM's parts, for requests and for snapshots from other nodes.

use crate::error::{Error, Result};
use crate::images::{config, name};
use crate::model::vm::Spec;
use crate::names;
use crate::volumes::MAX_PER_VM;
use jiffy_wire::agent::Command;
use jiffy_wire::api::{FolderUse, VolumeUse};
use jiffy_wire::guest::is_host_name;
use jiffy_wire::vmm::PageSize;
use std::ops::RangeInclusive;

/// Most vCPUs of a VM.
const MAX_CPUS: u8 = 32;
/// Least RAM of a VM, in MiB.
const MIN_MEMORY: u32 = 64;
/// Most RAM of a VM: 512 GiB, in MiB, as the VMM has it (`docs/guest-interface.md`).
const MAX_MEMORY: u32 = 512 << 10;
/// How many times its memory a VM may have at most.
const MEMORY_SPAN: u32 = 16;
/// Longest text of a command, with its environment, in bytes.
pub const MAX_COMMAND: usize = 256 * 1024;

/// Longest host name of a VM, in bytes.
const MAX_HOSTNAME: usize = 63;

/// Longest path of a mount point, in bytes.
const MAX_MOUNT_POINT: usize = 1024;
/// Longest path on the host: Linux's PATH_MAX without its zero.
const MAX_PATH: usize = 4095;

/// Most folders of the host that a VM can share.
const MAX_FOLDERS: usize = 8;

/// Checks where in the guest `what` is mounted.
fn check_mount(what: &str, path: &str) -> Result<()> {
    let odd = |part: &str| part == "." || part == "..";
    let good = path.starts_with('/')
        && !path.trim_matches('/').is_empty()
        && path.len() <= MAX_MOUNT_POINT
        && !path.contains(char::is_control)
        && !path.split('/').any(odd);
    if good {
        return Ok(());
    }
    let shown: String = path.chars().take(64).collect();
    Err(Error::invalid(format!(
        "{what} can't be mounted on {shown:?}: a mount point is an absolute path like /data."
    )))
}

/// Checks the folders of the host that a VM shares, except whether they exist.
///
/// # Errors
///
/// If a folder's path is not absolute, has a NUL byte or more than 4095 bytes, or as for
/// [`check_places`].
pub fn check_folders(folders: &[FolderUse]) -> Result<()> {
    for folder in folders {
        let source = &folder.source;
        if !source.starts_with('/') || source.len() > MAX_PATH || source.contains('\0') {
            let shown: String = source.chars().take(64).collect();
            return Err(Error::invalid(format!(
                "{shown:?} can't be shared with a VM: the folder needs an absolute path."
            )));
        }
    }
    check_places(folders)
}

/// The path without slashes at its end, as mount points are compared.
pub fn mount_point(path: &str) -> &str {
    path.trim_end_matches('/')
}

/// Checks where in the guest folders are mounted.
///
/// # Errors
///
/// If there are more than 8 folders, or two have the same mount point or one is not an absolute
/// path.
pub fn check_places(folders: &[FolderUse]) -> Result<()> {
    if folders.len() > MAX_FOLDERS {
        return Err(Error::invalid(format!(
            "A VM can't share {} folders of the host; it shares at most {MAX_FOLDERS}.",
            folders.len()
        )));
    }
    for (index, folder) in folders.iter().enumerate() {
        check_mount(&format!("The folder {}", folder.source), &folder.mount)?;
        let mount = mount_point(&folder.mount);
        let same = |other: &FolderUse| mount_point(&other.mount) == mount;
        if folders[..index].iter().any(same) {
            return Err(Error::invalid(format!(
                "Two folders of the host can't be mounted on {mount}."
            )));
        }
    }
    Ok(())
}

/// Checks the volumes of a VM, except whether they exist.
///
/// # Errors
///
/// If there are more than [`MAX_PER_VM`], a name or a mount point is not valid, or two are equal.
pub fn check_volumes(disks: &[VolumeUse]) -> Result<()> {
    if disks.len() > MAX_PER_VM {
        return Err(Error::invalid(format!(
            "A VM can't have {} volumes; it has at most {MAX_PER_VM}.",
            disks.len()
        )));
    }
    for (index, disk) in disks.iter().enumerate() {
        let others = &disks[..index];
        names::check("volume", &disk.name)?;
        if others.iter().any(|other| other.name == disk.name) {
            return Err(Error::invalid(format!(
                "The volume {} is given twice.",
                disk.name
            )));
        }
        let Some(path) = &disk.mount else {
            continue;
        };
        check_mount(&format!("The volume {}", disk.name), path)?;
        let mut taken = others.iter().filter_map(|other| other.mount.as_deref());
        if taken.any(|other| mount_point(other) == mount_point(path)) {
            return Err(Error::invalid(format!(
                "Two volumes can't be mounted on {path}."
            )));
        }
    }
    Ok(())
}

/// Checks the number of vCPUs.
///
/// # Errors
///
/// If it is not from 1 to 32.
pub fn check_cpus(cpus: u8) -> Result<()> {
    match (1..=MAX_CPUS).contains(&cpus) {
        true => Ok(()),
        false => Err(Error::invalid(format!(
            "A VM can't have {cpus} vCPUs; it can have 1 to {MAX_CPUS}."
        ))),
    }
}

/// Checks the most vCPUs that a VM with `cpus` may have.
///
/// # Errors
///
/// If it is not from `cpus` to 32.
pub fn check_max_cpus(max_cpus: u8, cpus: u8) -> Result<()> {
    check_cpus(max_cpus)?;
    match max_cpus >= cpus {
        true => Ok(()),
        false => Err(Error::invalid(format!(
            "The VM starts with {cpus} vCPUs; its maximum can't be {max_cpus}."
        ))),
    }
}

/// Checks the parts of a VM that was made on another node.
///
/// # Errors
///
/// If a part of `spec` is not valid: vCPUs, memory, kernel, image, configuration, command or host
/// name.
pub fn check_parts(spec: &Spec) -> Result<()> {
    check_cpus(spec.cpus)?;
    check_max_cpus(spec.vcpus(), spec.cpus)?;
    check_memory(spec.memory_mib, spec.pages)?;
    if let Some(most) = spec.max_memory_mib {
        check_max_memory(most, spec.memory_mib, spec.pages)?;
    }
    names::check("kernel", &spec.kernel)?;
    name::folder(&spec.image)?;
    config::check(&spec.config)?;
    if let Some(command) = &spec.command {
        check_command(command)?;
    }
    if let Some(hostname) = &spec.hostname {
        check_hostname(hostname)?;
    }
    Ok(())
}

/// Checks the size of RAM in MiB, and whether pages of that size can back it.
///
/// # Errors
///
/// If it is not from 64 MiB to 512 GiB, or is not a whole number of such pages.
pub fn check_memory(mib: u32, pages: PageSize) -> Result<()> {
    if !(MIN_MEMORY..=MAX_MEMORY).contains(&mib) {
        return Err(Error::invalid(format!(
            "A VM can't have {mib} MiB of memory; it has {MIN_MEMORY} to {MAX_MEMORY}."
        )));
    }
    let (unit, name) = match pages {
        PageSize::Small => return Ok(()),
        PageSize::Huge2M => (2, "2 MiB"),
        PageSize::Huge1G => (1024, "1 GiB"),
    };
    if !mib.is_multiple_of(unit) {
        return Err(Error::invalid(format!(
            "{mib} MiB of memory can't be made of {name} pages."
        )));
    }
    Ok(())
}

/// How much memory a VM may have that may have at most `most` MiB: its kernel needs a 64th of that for
/// the descriptions of all pages, whatever programs may use.
pub fn memory_range(most: u32) -> RangeInclusive<u32> {
    MIN_MEMORY.max(most / MEMORY_SPAN)..=most
}

/// Checks the most memory, MiB, that a VM which starts with `mib` may have.
///
/// # Errors
///
/// If `most` is not valid memory, the pages are huge, or `mib` is not in [`memory_range`].
pub fn check_max_memory(most: u32, mib: u32, pages: PageSize) -> Result<()> {
    check_memory(most, pages)?;
    if pages != PageSize::Small {
        return Err(Error::invalid(
            "The memory of a VM in huge pages can't change while it runs.",
        ));
    }
    let range = memory_range(most);
    match range.contains(&mib) {
        true => Ok(()),
        false => Err(Error::invalid(format!(
            "A VM with at most {most} MiB of memory can't start with {mib} MiB; it can have {} to {} MiB.",
            range.start(),
            range.end()
        ))),
    }
}

/// Checks the command of a VM or of `exec`.
///
/// # Errors
///
/// If there is no program, or as for [`check_settings`].
pub fn check_command(command: &Command) -> Result<()> {
    if command.argv.first().is_none_or(String::is_empty) {
        return Err(Error::invalid("The command is empty."));
    }
    check_settings(command)
}

/// Checks the words, environment, working directory and user of a command that may have no program.
///
/// # Errors
///
/// If a text has a NUL byte, an entry of the environment is not `NAME=value`, or all have more than
/// [`MAX_COMMAND`] bytes.
pub fn check_settings(command: &Command) -> Result<()> {
    let texts = || {
        let optional = command.cwd.iter().chain(&command.user);
        command.argv.iter().chain(&command.env).chain(optional)
    };
    if texts().any(|text| text.contains('\0')) {
        return Err(Error::invalid("The command contains a NUL byte."));
    }
    if let Some(entry) = command.env.iter().find(|entry| {
        let name = entry.split_once('=').map_or("", |(name, _)| name);
        name.is_empty()
    }) {
        let shown: String = entry.chars().take(64).collect();
        return Err(Error::invalid(format!(
            "The environment entry {shown:?} is not of the form NAME=value."
        )));
    }
    let bytes: usize = texts().map(|text| text.len() + 1).sum();
    if bytes > MAX_COMMAND {
        return Err(Error::invalid(format!(
            "The command and its environment have {bytes} bytes; at most {MAX_COMMAND} fit."
        ))
        .hint("Copy large data into the VM with `jiffy cp`."));
    }
    Ok(())
}

/// Checks the name of a guest.
///
/// # Errors
///
/// If it has more than 63 bytes, or characters that no host name has.
pub fn check_hostname(name: &str) -> Result<()> {
    if name.len() <= MAX_HOSTNAME && is_host_name(name) {
        return Ok(());
    }
    Err(Error::invalid(
        "A host name has 1 to 63 letters, digits, `.`, `-` and `_`.",
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_volumes_need_two_places() {
        let volume = |name: &str, mount: &str| VolumeUse {
            name: name.into(),
            mount: Some(mount.into()).filter(|mount: &String| !mount.is_empty()),
            ..VolumeUse::default()
        };
        check_volumes(&[volume("a", "/a"), volume("b", "/b")]).unwrap();
        check_volumes(&[volume("a", ""), volume("b", "")]).unwrap();
        let error = check_volumes(&[volume("a", "/data"), volume("b", "/data/")]).unwrap_err();
        assert!(error.to_string().contains("on /data/"), "{error}");
    }

    #[test]
    fn every_invalid_command_is_refused() {
        let command = |argv: &[&str], env: &[&str]| Command {
            argv: argv.iter().map(|word| word.to_string()).collect(),
            env: env.iter().map(|word| word.to_string()).collect(),
            ..Command::default()
        };
        check_command(&command(&["true"], &["A=", "B=c=d"])).unwrap();
        let long = "x".repeat(MAX_COMMAND);
        for (argv, env) in [
            (&[][..], &[][..]),
            (&[""], &[]),
            (&["a\0b"], &[]),
            (&["true"], &["novalue"]),
            (&["true"], &["=x"]),
            (&[long.as_str()], &[]),
        ] {
            assert!(check_command(&command(argv, env)).is_err());
        }
    }
}
