//! Checks requests for VMs, and makes specifications of them.
//!
//! * `network`: the network, policy and ports of a VM.

mod network;

pub use network::inherited;

use jiffy_content::checks::{
    MAX_COMMAND, check_command, check_cpus, check_folders, check_hostname, check_max_cpus,
    check_max_memory, check_memory, check_settings, check_volumes, mount_point,
};
use jiffy_content::error::{Error, Result};
use jiffy_content::images::base::BASE;
use jiffy_content::images::{Found, config};
use jiffy_content::model::snapshot::Manifest;
use jiffy_content::model::vm::{FromSnapshot, Spec};
use jiffy_content::names;
use jiffy_content::roots;
use jiffy_sys::causes;
use jiffy_vmhost::network::Network;
use jiffy_wire::agent::Command;
use jiffy_wire::api::{CreateVm, FolderUse, IdleAction, IdlePolicy, ImageConfig, Priority};
use jiffy_wire::cpu::{Wanted, levels};
use jiffy_wire::vmm::{DiskLimit, PageSize};
use std::ops::RangeInclusive;

/// Longest kernel parameters of a request, in bytes.
const MAX_KERNEL_ARGS: usize = 1024;
/// Seconds.
const DAY: u32 = 86_400;
/// How long a VM may be idle before it is hibernated or stopped, seconds.
const IDLE_TIMES: RangeInclusive<u32> = 1..=365 * DAY;

/// Checks a request for a VM of this image and fills in the defaults.
///
/// # Errors
///
/// If a part of the request is not valid or the parts do not fit together, or VMs can't have this
/// network here.
pub fn check(wanted: CreateVm, image: &Found, network: &Network) -> Result<Spec> {
    let asked = wanted.network.clone();
    let spec = check_of(wanted, &image.name, image.config())?;
    Ok(Spec {
        network: self::network::wanted(asked, image.config(), network)?,
        ..spec
    })
}

/// A VM of the built-in image, in tests.
#[cfg(test)]
pub fn of_base(wanted: CreateVm) -> Spec {
    check_of(wanted, "base", &ImageConfig::default()).unwrap()
}

/// As [`check`], without the network, for an image with this name and configuration.
///
/// # Errors
///
/// If a part of the request is not valid, or the parts do not fit together.
pub fn check_of(mut wanted: CreateVm, image: &str, image_config: &ImageConfig) -> Result<Spec> {
    if let Some(name) = &wanted.name {
        names::check_vm(name)?;
    }
    let kernel = wanted.kernel.take().unwrap_or_else(|| BASE.into());
    names::check("kernel", &kernel)?;
    let (cpus, memory_mib) = check_size(&wanted)?;
    check_volumes(&wanted.disks)?;
    check_folders(&wanted.folders)?;
    if let Some(root_disk) = &wanted.root_disk {
        roots::check(root_disk)?;
    }
    let config = config_with(image_config, wanted.command.as_ref())?;
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
        check_kernel_args(args)?;
    }
    if let Some(profile) = &wanted.cpu_profile {
        check_cpu_profile(profile)?;
    }
    check_idle(
        wanted.idle,
        wanted.init.as_deref(),
        wanted.pages,
        &wanted.folders,
    )?;
    check_owner(wanted.owner.as_deref())?;
    Ok(Spec {
        image: image.to_owned(),
        config,
        kernel,
        cpus,
        max_cpus: wanted.max_cpus.filter(|most| *most > cpus),
        memory_mib,
        max_memory_mib: wanted.max_memory_mib.filter(|most| *most > memory_mib),
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
        deep: wanted.deep,
        from: None,
        cold: wanted.cold,
        hidden: false,
        preload: Vec::new(),
        root_disk: wanted.root_disk,
        root_limit: wanted.root_limit,
        own_volumes: false,
        folders: wanted.folders,
        network: None,
        idle: wanted.idle,
        owner: wanted.owner,
        priority: wanted.priority,
    })
}

/// The vCPUs and the MiB of memory that a request asks for.
fn check_size(wanted: &CreateVm) -> Result<(u8, u32)> {
    let cpus = wanted.cpus.unwrap_or(1);
    check_cpus(cpus)?;
    if let Some(most) = wanted.max_cpus {
        check_max_cpus(most, cpus)?;
    }
    let memory_mib = wanted.memory_mib.unwrap_or(128);
    check_memory(memory_mib, wanted.pages)?;
    if let Some(most) = wanted.max_memory_mib {
        check_max_memory(most, memory_mib, wanted.pages)?;
    }
    Ok((cpus, memory_mib))
}

fn check_kernel_args(args: &str) -> Result<()> {
    let odd = |c: char| c.is_control() || !c.is_ascii();
    if args.len() > MAX_KERNEL_ARGS || args.contains(odd) {
        return Err(Error::invalid(format!(
            "The kernel parameters must be at most {MAX_KERNEL_ARGS} printable ASCII characters."
        )));
    }
    Ok(())
}

/// Refuses options of which the snapshot of this name decides.
fn refuse_what_was_captured(name: &str, wanted: &CreateVm) -> Result<()> {
    let decided = [
        ("image", wanted.image.is_some()),
        ("entrypoint", wanted.entrypoint.is_some()),
        ("kernel", wanted.kernel.is_some()),
        ("number of vCPUs", wanted.cpus.is_some()),
        ("largest number of vCPUs", wanted.max_cpus.is_some()),
        ("memory", wanted.memory_mib.is_some()),
        ("largest memory", wanted.max_memory_mib.is_some()),
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
            "The {what} of a VM from a snapshot can't be chosen: it is that of the snapshot {name}."
        ))
        .hint("Leave that option out, or run a VM without --from."));
    }
    Ok(())
}

/// Checks a request for a VM that is restored from a snapshot, which determines its parts.
///
/// # Errors
///
/// If a part of the request is not valid, or the snapshot decides it.
pub fn from_snapshot(
    name: &str,
    manifest: &Manifest,
    mut wanted: CreateVm,
    network: &Network,
) -> Result<Spec> {
    if let Some(name) = &wanted.name {
        names::check_vm(name)?;
    }
    let mut command = wanted.command.take();
    let config = config_with(&manifest.spec.config, command.as_ref())?;
    if let Some(command) = &mut command {
        // The request's command replaces the captured one; the captured image's configuration fills
        // in the rest.
        config::fill(command, &manifest.spec.config);
        check_command(command)?;
    }
    if let Some(hostname) = &wanted.hostname {
        check_hostname(hostname)?;
    }
    refuse_what_was_captured(name, &wanted)?;
    let captured = &manifest.spec;
    let folders = folders_of_snapshot(name, &captured.folders, wanted.folders)?;
    check_idle(
        wanted.idle,
        captured.init.as_deref(),
        captured.pages,
        &folders,
    )?;
    check_owner(wanted.owner.as_deref())?;
    if wanted.cold {
        return Err(Error::invalid(
            "A VM can't both boot and be restored from a snapshot.",
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
        config,
        command: command.or_else(captured),
        remove: wanted.remove,
        hostname: wanted.hostname,
        timeline: wanted.timeline,
        deep: wanted.deep,
        from: Some(FromSnapshot {
            name: name.to_owned(),
            start_main,
        }),
        cold: false,
        hidden: false,
        own_volumes: !manifest.spec.disks.is_empty() || manifest.spec.root_disk.is_some(),
        folders,
        network: self::network::of_snapshot(
            name,
            &manifest.spec,
            manifest.source.is_some(),
            wanted.network,
            network,
        )?,
        idle: wanted.idle,
        owner: wanted.owner,
        priority: wanted.priority,
        ..manifest.spec.clone()
    })
}

/// The configuration that a VM keeps for `exec`: the image's, with the settings of the request's
/// command, even if that has no program and the VM waits.
fn config_with(image: &ImageConfig, command: Option<&Command>) -> Result<ImageConfig> {
    let Some(command) = command else {
        return Ok(image.clone());
    };
    check_settings(command)?;
    let kept = config::with_settings(image, command);
    config::check(&kept).map_err(|_| {
        Error::invalid("The command's environment and the image's configuration are too large.")
            .hint("Copy large data into the VM with `jiffy cp`.")
    })?;
    Ok(kept)
}

/// The folders of a VM from a snapshot: those that the request gives, in the order of the captured
/// ones. Which folder of the host is shared is never the snapshot's choice, because it may be
/// someone else's.
fn folders_of_snapshot(
    name: &str,
    captured: &[FolderUse],
    mut wanted: Vec<FolderUse>,
) -> Result<Vec<FolderUse>> {
    let mut folders = Vec::with_capacity(wanted.len());
    for folder in captured {
        let mount = mount_point(&folder.mount);
        let is_it = |given: &FolderUse| mount_point(&given.mount) == mount;
        let Some(at) = wanted.iter().position(is_it) else {
            return Err(Error::invalid(format!(
                "The VM of the snapshot {name} shared a folder of its host on {mount}."
            ))
            .hint(format!(
                "Give a folder of this host for it: -v HOST:{mount}"
            )));
        };
        folders.push(wanted.swap_remove(at));
    }
    if let Some(folder) = wanted.first() {
        return Err(Error::invalid(format!(
            "The VM of the snapshot {name} shared no folder of its host on {}.",
            folder.mount
        ))
        .hint("Leave that option out, or run a VM without --from."));
    }
    check_folders(&folders)?;
    Ok(folders)
}

/// The specification of the VM of which a golden snapshot for this kind is made; `None` if there
/// can be none.
pub fn golden(spec: &Spec) -> Option<Spec> {
    let plain = spec.disks.is_empty()
        && spec.folders.is_empty()
        && spec.root_disk.is_none()
        && spec.init.is_none()
        && !spec.console
        && spec.kernel_args.is_none()
        && spec.cpu_profile.is_none()
        && spec.pages == PageSize::Small
        && spec.from.is_none()
        && !spec.cold
        && !spec.hidden;
    // The program is preloaded, because it is likely to be run again.
    let program = spec.command.iter().flat_map(|command| command.argv.first());
    plain.then(|| Spec {
        preload: program.cloned().collect(),
        command: None,
        config: ImageConfig::default(),
        remove: true,
        hostname: None,
        timeline: false,
        deep: false,
        cold: true,
        hidden: true,
        network: spec
            .network
            .as_ref()
            .map(|_| jiffy_vmhost::network::plain()),
        root_limit: DiskLimit::default(),
        idle: None,
        owner: None,
        priority: Priority::Normal,
        ..spec.clone()
    })
}

/// Checks a CPU profile as far as possible without KVM.
fn check_cpu_profile(profile: &Wanted) -> Result<()> {
    let checked = match profile {
        Wanted::Named(name) => levels::find(name).map(drop),
        Wanted::Given(profile) => profile.check(),
    };
    checked.map_err(|why| {
        Error::invalid(format!("{}.", causes::capitalised(why)))
            .hint("`jiffy doctor --cpu` shows which named profiles this host supports.")
    })
}

fn check_owner(owner: Option<&str>) -> Result<()> {
    owner.map_or(Ok(()), |name| names::check("VM's owner", name))
}

fn check_idle(
    idle: Option<IdlePolicy>,
    init: Option<&[String]>,
    pages: PageSize,
    folders: &[FolderUse],
) -> Result<()> {
    let Some(IdlePolicy { after_s, action }) = idle else {
        return Ok(());
    };
    if !IDLE_TIMES.contains(&after_s) {
        return Err(Error::invalid(format!(
            "The idle time of a VM can't be {after_s} s; choose 1 second to {} days.",
            IDLE_TIMES.end() / DAY
        )));
    }
    const HINT: &str = "Use --idle-action stop, or leave --idle out.";
    let lasting = match init {
        Some(init) => Some((format!("hands PID 1 to {}", init.join(" ")), HINT)),
        None if pages != PageSize::Small => Some(("has huge pages".to_owned(), HINT)),
        None if folders.iter().any(|folder| !folder.capture) => Some((
            "shares folders of the host".to_owned(),
            "Share them with -v HOST:GUEST:capture, use --idle-action stop, or leave --idle out.",
        )),
        None => None,
    };
    match lasting.filter(|_| action == IdleAction::Hibernate) {
        None => Ok(()),
        Some((why, hint)) => Err(Error::invalid(format!(
            "A VM that {why} can't be hibernated when it is idle."
        ))
        .hint(hint)),
    }
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

#[cfg(test)]
mod tests {
    use super::*;
    use jiffy_wire::api::{ErrorKind, NoCommand, VolumeUse};

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
    fn an_empty_request_is_a_small_base_vm() {
        let spec = check(CreateVm::default()).unwrap();
        assert_eq!((spec.cpus, spec.memory_mib), (1, 128));
        assert_eq!(
            (spec.image.as_str(), spec.kernel.as_str()),
            ("base", "base")
        );
    }

    #[test]
    fn the_settings_of_a_vm_that_waits_are_checked() {
        let waits = |env: &str| {
            check(CreateVm {
                command: Some(Command {
                    env: vec![env.to_owned()],
                    ..Command::default()
                }),
                no_command: NoCommand::Wait,
                ..CreateVm::default()
            })
        };
        let kept = waits("A=1").unwrap();
        assert_eq!(kept.command, None);
        assert_eq!(kept.config.env, ["A=1"]);
        let error = waits("=1").unwrap_err().0;
        assert!(error.message.contains("NAME=value"), "{}", error.message);
    }

    #[test]
    fn every_invalid_value_is_named_in_the_error() {
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
        let idle = |after_s| {
            Some(IdlePolicy {
                after_s,
                action: IdleAction::Hibernate,
            })
        };
        assert!(refused(|vm| vm.idle = idle(0)).contains("0 s"));
        refused(|vm| vm.idle = idle(u32::MAX));
        let init = |vm: &mut CreateVm| {
            vm.idle = idle(60);
            vm.init = Some(vec!["/sbin/init".into()]);
        };
        assert!(refused(init).contains("PID 1"));
        let huge = |vm: &mut CreateVm| {
            vm.idle = idle(60);
            vm.pages = PageSize::Huge2M;
        };
        assert!(refused(huge).contains("huge pages"));
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
}
