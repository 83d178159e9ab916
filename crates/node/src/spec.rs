//! Checks what a request wants a VM to be.

use crate::error::{Error, Result};
use crate::images::base::BASE;
use crate::images::{Found, config};
use crate::names;
use crate::roots;
use crate::snapshots::manifest::Manifest;
use crate::vm::record::{FromSnapshot, Spec};
use crate::volumes::MAX_PER_VM;
use jiffy_wire::agent::Command;
use jiffy_wire::api::{CreateVm, ImageConfig, VolumeUse};
use jiffy_wire::cpu::{Wanted, levels};
use jiffy_wire::vmm::PageSize;

/// Most vCPUs of a VM.
const MAX_CPUS: u8 = 32;
/// Least RAM of a VM, in MiB.
const MIN_MEMORY: u32 = 64;
/// Most RAM of a VM: 16 TiB, in MiB.
const MAX_MEMORY: u32 = 16 << 20;
/// Longest kernel parameters of a request, in bytes.
const MAX_KERNEL_ARGS: usize = 1024;
/// Longest text of a command, with its environment, in bytes.
const MAX_COMMAND: usize = 256 * 1024;

/// Checks a request for a VM of this image and fills in the defaults.
pub fn check(wanted: CreateVm, image: &Found) -> Result<Spec> {
    check_of(wanted, &image.name, image.config())
}

/// A VM of the built-in image, in tests.
#[cfg(test)]
pub fn of_base(wanted: CreateVm) -> Spec {
    check_of(wanted, "base", &ImageConfig::default()).unwrap()
}

/// The same, of an image with this name and configuration.
pub fn check_of(wanted: CreateVm, image: &str, image_config: &ImageConfig) -> Result<Spec> {
    if let Some(name) = &wanted.name {
        names::check_vm(name)?;
    }
    let kernel = wanted.kernel.unwrap_or_else(|| BASE.into());
    names::check("kernel", &kernel)?;
    let cpus = wanted.cpus.unwrap_or(1);
    if !(1..=MAX_CPUS).contains(&cpus) {
        return Err(Error::invalid(format!(
            "A VM can't have {cpus} vCPUs; it has 1 to {MAX_CPUS}."
        )));
    }
    let memory_mib = wanted.memory_mib.unwrap_or(128);
    check_memory(memory_mib, wanted.pages)?;
    check_volumes(&wanted.disks)?;
    if let Some(root_disk) = &wanted.root_disk {
        roots::check(root_disk)?;
    }
    let command = config::first_command(
        wanted.command,
        wanted.entrypoint,
        image_config,
        image,
        wanted.no_command,
    )?;
    if let Some(command) = &command {
        check_command(command)?;
    }
    if let Some(init) = &wanted.init {
        check_init(init)?;
    }
    if let Some(hostname) = &wanted.hostname {
        check_hostname(hostname)?;
    }
    if let Some(args) = &wanted.kernel_args {
        let odd = |c: char| c.is_control() || !c.is_ascii();
        if args.len() > MAX_KERNEL_ARGS || args.contains(odd) {
            return Err(Error::invalid(format!(
                "The kernel parameters must be at most {MAX_KERNEL_ARGS} printable ASCII characters."
            )));
        }
    }
    if let Some(profile) = &wanted.cpu_profile {
        check_cpu_profile(profile)?;
    }
    Ok(Spec {
        image: image.to_owned(),
        config: image_config.clone(),
        kernel,
        cpus,
        memory_mib,
        pages: wanted.pages,
        disks: wanted.disks,
        command,
        init: wanted.init,
        console: wanted.console,
        remove: wanted.remove,
        hostname: wanted.hostname,
        kernel_args: wanted.kernel_args,
        cpu_profile: wanted.cpu_profile,
        timeline: wanted.timeline,
        from: None,
        cold: wanted.cold,
        hidden: false,
        preload: Vec::new(),
        root_disk: wanted.root_disk,
        root_limit: wanted.root_limit,
        own_volumes: false,
    })
}

/// Checks a request for a VM that goes on from a snapshot. The snapshot
/// decides what it is made of.
pub fn from_snapshot(name: &str, manifest: &Manifest, wanted: CreateVm) -> Result<Spec> {
    if let Some(name) = &wanted.name {
        names::check_vm(name)?;
    }
    let mut command = wanted.command;
    if let Some(command) = &mut command {
        // It takes the place of the one that was captured, and is started as
        // that was.
        config::fill(command, &manifest.spec.config);
        check_command(command)?;
    }
    if let Some(hostname) = &wanted.hostname {
        check_hostname(hostname)?;
    }
    let decided = [
        ("image", wanted.image.is_some()),
        ("entrypoint", wanted.entrypoint.is_some()),
        ("kernel", wanted.kernel.is_some()),
        ("number of vCPUs", wanted.cpus.is_some()),
        ("memory", wanted.memory_mib.is_some()),
        ("page size", wanted.pages != PageSize::Small),
        ("volumes", !wanted.disks.is_empty()),
        ("root disk", wanted.root_disk.is_some()),
        ("limit of the root's disks", !wanted.root_limit.is_none()),
        ("init", wanted.init.is_some()),
        ("console", wanted.console),
        ("kernel parameters", wanted.kernel_args.is_some()),
        ("CPU profile", wanted.cpu_profile.is_some()),
    ];
    if let Some((what, _)) = decided.iter().find(|(_, given)| *given) {
        return Err(Error::invalid(format!(
            "The {what} of a VM from a snapshot can't be chosen: the snapshot {name} decides."
        ))
        .hint("Leave that out, or run a VM that is not from a snapshot."));
    }
    if wanted.cold {
        return Err(Error::invalid(
            "A VM can't both boot and go on from a snapshot.",
        ));
    }
    let start_main = command.is_some();
    let captured = || {
        manifest
            .spec
            .command
            .clone()
            .filter(|_| manifest.has_main())
    };
    Ok(Spec {
        command: command.or_else(captured),
        remove: wanted.remove,
        hostname: wanted.hostname,
        timeline: wanted.timeline,
        from: Some(FromSnapshot {
            name: name.to_owned(),
            start_main,
        }),
        cold: false,
        hidden: false,
        own_volumes: !manifest.spec.disks.is_empty() || manifest.spec.root_disk.is_some(),
        ..manifest.spec.clone()
    })
}

/// The VM that a golden snapshot for VMs of this kind is taken of; none if
/// there can be no such snapshot.
pub fn golden(spec: &Spec) -> Option<Spec> {
    let plain = spec.disks.is_empty()
        && spec.root_disk.is_none()
        && spec.root_limit.is_none()
        && spec.init.is_none()
        && !spec.console
        && spec.kernel_args.is_none()
        && spec.cpu_profile.is_none()
        && spec.pages == PageSize::Small
        && spec.from.is_none()
        && !spec.cold
        && !spec.hidden;
    // What was run once is likely to be run again.
    let program = spec.command.iter().flat_map(|command| command.argv.first());
    plain.then(|| Spec {
        preload: program.cloned().collect(),
        command: None,
        config: ImageConfig::default(),
        remove: true,
        hostname: None,
        timeline: false,
        cold: true,
        hidden: true,
        ..spec.clone()
    })
}

/// What can be said of it without asking KVM.
fn check_cpu_profile(profile: &Wanted) -> Result<()> {
    let checked = match profile {
        Wanted::Named(name) => levels::find(name).map(drop),
        Wanted::Given(profile) => profile.check(),
    };
    checked.map_err(|why| {
        let mut sentence = why;
        sentence[..1].make_ascii_uppercase();
        Error::invalid(format!("{sentence}."))
            .hint("`jiffy doctor --cpu` prints this host's, and those with a name that it has.")
    })
}

/// Longest path of a mount point, in bytes.
const MAX_MOUNT_POINT: usize = 1024;

fn check_mount(disk: &VolumeUse) -> Result<()> {
    let Some(path) = &disk.mount else {
        return Ok(());
    };
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
        "The volume {} can't be mounted on {shown:?}: a mount point is an absolute path like /data.",
        disk.name
    )))
}

/// Checks the volumes of a VM, but for whether they exist.
pub fn check_volumes(disks: &[VolumeUse]) -> Result<()> {
    if disks.len() > MAX_PER_VM {
        return Err(Error::invalid(format!(
            "A VM can't have {} volumes; it has at most {MAX_PER_VM}.",
            disks.len()
        )));
    }
    for (index, disk) in disks.iter().enumerate() {
        names::check("volume", &disk.name)?;
        check_mount(disk)?;
        if disks[..index].iter().any(|other| other.name == disk.name) {
            return Err(Error::invalid(format!(
                "The volume {} is given twice.",
                disk.name
            )));
        }
    }
    Ok(())
}

/// Checks what a VM was made of elsewhere.
pub fn check_parts(spec: &Spec) -> Result<()> {
    if !(1..=MAX_CPUS).contains(&spec.cpus) {
        return Err(Error::invalid(format!(
            "A VM can't have {} vCPUs; it has 1 to {MAX_CPUS}.",
            spec.cpus
        )));
    }
    check_memory(spec.memory_mib, spec.pages)?;
    names::check("kernel", &spec.kernel)?;
    crate::images::name::folder(&spec.image)?;
    config::check(&spec.config)?;
    if let Some(command) = &spec.command {
        check_command(command)?;
    }
    if let Some(hostname) = &spec.hostname {
        check_hostname(hostname)?;
    }
    Ok(())
}

fn check_memory(mib: u32, pages: PageSize) -> Result<()> {
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

/// Checks the command of a VM or of `exec`.
pub fn check_command(command: &Command) -> Result<()> {
    if command.argv.first().is_none_or(String::is_empty) {
        return Err(Error::invalid("The command is empty."));
    }
    let texts = || {
        let optional = command.cwd.iter().chain(&command.user);
        command.argv.iter().chain(&command.env).chain(optional)
    };
    if texts().any(|text| text.contains('\0')) {
        return Err(Error::invalid("The command holds a NUL byte."));
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

fn check_init(init: &[String]) -> Result<()> {
    let good = init.first().is_some_and(|program| program.starts_with('/'))
        && init.iter().all(|word| !word.contains('\0'))
        && init.iter().map(String::len).sum::<usize>() <= MAX_COMMAND;
    if good {
        return Ok(());
    }
    Err(Error::invalid(
        "The init program must be an absolute path in the image, like /sbin/init.",
    ))
}

fn check_hostname(name: &str) -> Result<()> {
    let good = (1..=63).contains(&name.len())
        && name
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_'));
    if good {
        return Ok(());
    }
    Err(Error::invalid(
        "A host name has 1 to 63 letters, digits, `.`, `-` and `_`.",
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use jiffy_wire::api::ErrorKind;

    fn check(wanted: CreateVm) -> Result<Spec> {
        check_of(wanted, "base", &ImageConfig::default())
    }

    fn refused(change: impl FnOnce(&mut CreateVm)) -> String {
        let mut wanted = CreateVm::default();
        change(&mut wanted);
        let error = check(wanted).unwrap_err();
        assert_eq!(error.0.kind, ErrorKind::Invalid);
        error.0.message
    }

    #[test]
    fn nothing_wanted_is_a_small_base_vm() {
        let spec = check(CreateVm::default()).unwrap();
        assert_eq!((spec.cpus, spec.memory_mib), (1, 128));
        assert_eq!(
            (spec.image.as_str(), spec.kernel.as_str()),
            ("base", "base")
        );
    }

    #[test]
    fn every_bad_value_is_named() {
        assert!(refused(|vm| vm.name = Some("a/b".into())).contains("a/b"));
        assert!(refused(|vm| vm.kernel = Some(String::new())).contains("kernel"));
        assert!(refused(|vm| vm.cpus = Some(0)).contains("0 vCPUs"));
        assert!(refused(|vm| vm.cpus = Some(33)).contains("33 vCPUs"));
        assert!(refused(|vm| vm.memory_mib = Some(63)).contains("63 MiB"));
        assert!(refused(|vm| vm.memory_mib = Some(u32::MAX)).contains("MiB"));
        refused(|vm| {
            vm.memory_mib = Some(129);
            vm.pages = PageSize::Huge2M;
        });
        refused(|vm| vm.kernel_args = Some("a\nb".into()));
        refused(|vm| vm.kernel_args = Some("a".repeat(1025)));
        refused(|vm| vm.hostname = Some("a b".into()));
        refused(|vm| vm.init = Some(vec!["init".into()]));
        refused(|vm| vm.init = Some(vec![]));
        let disk = |name: &str| VolumeUse {
            name: name.into(),
            size_mib: None,
            read_only: false,
            ..VolumeUse::default()
        };
        assert!(refused(|vm| vm.disks = vec![disk("a"), disk("a")]).contains("twice"));
        for mount in ["data", "/", "//", "/a/../b", "/a/./b", "/a\nb", ""] {
            let disk = VolumeUse {
                mount: Some(mount.into()),
                ..disk("a")
            };
            assert!(refused(|vm| vm.disks = vec![disk]).contains("mounted"));
        }
        let size_mib = 1;
        refused(|vm| vm.root_disk = Some(jiffy_wire::api::RootDisk::Layer { size_mib }));
        refused(|vm| vm.disks = (0..25).map(|index| disk(&index.to_string())).collect());
    }

    #[test]
    fn every_bad_command_is_named() {
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
