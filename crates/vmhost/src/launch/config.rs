//! The configurations of a VMM and of its guest.

use super::folders::{self, SharedFolder};
use super::handover::Descriptors;
use super::plan::{Beginning, Plan, Restoring, SavedRam};
use crate::folders::gate_record;
use crate::jails::Launcher;
use crate::network::{self, Attachment};
use jiffy_content::error::{Error, Result};
use jiffy_content::model::vm::{Spec, VmRecord};
use jiffy_content::names;
use jiffy_content::paths::Paths;
use jiffy_content::roots;
use jiffy_wire::api::VolumeUse;
use jiffy_wire::guest::{self, DiskMount, GuestConfig};
use jiffy_wire::vmm::{
    self, Boot, Disk, FwCfgContents, FwCfgFile, Memory, Net, NetBackend, NewGeneration, Restore,
    SavedMemory, Serial, VmmConfig, Vsock,
};
use std::path::PathBuf;
use std::time::Duration;

/// Longest kernel command line of Linux on x86, bytes, without what the VMM appends.
const MAX_COMMAND_LINE: usize = 1536;

/// The configuration of the VMM for this plan.
pub(super) fn vmm_config<'a>(
    paths: &Paths,
    record: &VmRecord,
    plan: &'a Plan,
    shared: &'a [SharedFolder],
    gate_time: Duration,
    descriptors: &mut Descriptors<'a>,
) -> Result<VmmConfig> {
    let spec = &record.spec;
    let folder = paths.vm(&record.id);
    let guest = serde_json::to_string(&guest_config(record, plan)).map_err(|error| {
        Error::internal(format!(
            "The guest's configuration can't be written: {error}."
        ))
    })?;
    if guest.len() > guest::MAX_CONFIG {
        return Err(Error::invalid(format!(
            "The command and its environment make {} bytes of configuration; at most {} fit.",
            guest.len(),
            guest::MAX_CONFIG
        )));
    }
    let mut config = VmmConfig {
        version: vmm::VERSION,
        id: record.id.clone(),
        vcpus: spec.vcpus(),
        memory: Memory {
            size_mib: spec.ram_mib(),
            pages: spec.pages,
            prefault: false,
        },
        boot: Boot {
            kernel: plan.kernel.clone(),
            initrd: Some(paths.initramfs()),
            command_line: command_line(spec, record.cpus())?,
        },
        disks: disks(paths, record, plan, descriptors.launcher),
        vsock: Some(Vsock {
            cid: record.cid.into(),
            path: descriptors
                .launcher
                .inside(&paths.vsock_socket(&record.id))
                .into(),
        }),
        rng: true,
        serial: spec
            .console
            .then(|| Serial::File(folder.join("console.log"))),
        fw_cfg: vec![FwCfgFile {
            name: guest::FW_CFG_NAME.into(),
            contents: FwCfgContents::Text(guest),
        }],
        control: Some(paths.control_socket(&record.id)),
        exit_record: Some(folder.join("exit.json")),
        handed: Vec::new(),
        balloon: true,
        usable_memory_mib: spec.max_memory_mib.map(|_| record.memory_mib()),
        nets: nets(record, plan, descriptors)?,
        folders: folders::devices(shared.iter().map(|folder| descriptors.folder(folder))),
        cpu_profile: spec.cpu_profile.clone(),
        record_activity: spec.deep,
        restore: match &plan.beginning {
            Beginning::Boot => None,
            Beginning::Restore(restoring) => {
                Some(restore(paths, record, restoring, gate_time, descriptors)?)
            }
        },
    };
    config.handed = descriptors.pass(&config, paths, plan.root.lazy.as_ref())?;
    Ok(config)
}

/// A VM's disks; the root is filled on demand if its image is only partly here.
fn disks(paths: &Paths, record: &VmRecord, plan: &Plan, launcher: &Launcher) -> Vec<Disk> {
    let mut disks = plan.disks.clone();
    for (disk, limit) in disks.iter_mut().zip(record.disk_limits()) {
        disk.limit = limit;
    }
    // A writable copy of the image is always complete.
    let root = disks.first_mut().filter(|root| root.read_only);
    if let (Some(lazy), Some(root)) = (&plan.root.lazy, root) {
        let mut residency = lazy.residency(paths, &record.id);
        residency.pager_socket = launcher.inside(&residency.pager_socket).into();
        root.residency = Some(residency);
    } else if let Some(root) = disks.first_mut() {
        // A guest that boots in the background for a golden snapshot records the boot set. A
        // writable root is complete and needs none.
        root.note_reads =
            plan.low_priority && root.read_only && matches!(plan.beginning, Beginning::Boot);
    }
    disks
}

fn restore<'a>(
    paths: &Paths,
    record: &VmRecord,
    restoring: &'a Restoring,
    gate_time: Duration,
    descriptors: &mut Descriptors<'a>,
) -> Result<Restore> {
    Ok(Restore {
        state: descriptors.source(&restoring.state)?,
        memory: match &restoring.memory {
            SavedRam::Mapped { layers, layout } => SavedMemory::Mapped {
                layers: descriptors.sources(layers)?,
                layout: layout
                    .as_ref()
                    .map(|layout| descriptors.source(layout))
                    .transpose()?,
            },
            SavedRam::Paged { paged, .. } => SavedMemory::Paged {
                socket: descriptors
                    .launcher
                    .inside(&paths.vm_memory_socket(&record.id))
                    .into(),
                working_set: paged.prefetch,
            },
        },
        prefault: restoring.prefault.clone(),
        map_ahead: restoring.map_ahead.clone(),
        no_readahead: restoring.no_readahead,
        generation: Some(NewGeneration {
            id: names::new_uuid(),
            start_main: restoring.start_main,
            deadline_ms: gate_time.as_millis().try_into().unwrap_or(u32::MAX),
        }),
        // Only a VM that wakes has files of its own, which are stale when it runs.
        gate_record: restoring
            .origin
            .is_none()
            .then(|| gate_record(&paths.vm(&record.id))),
        hold: false,
    })
}

/// A VM's network interface, if it has one. Its link is down if the host has no network.
fn nets<'a>(
    record: &VmRecord,
    plan: &'a Plan,
    descriptors: &mut Descriptors<'a>,
) -> Result<Vec<Net>> {
    let Some(limit) = record.network_limit() else {
        return Ok(Vec::new());
    };
    let (backend, guard) = match &plan.network {
        Some(attachment) => descriptors.network(&attachment.peer),
        None => (NetBackend::None, None),
    };
    Ok(vec![Net {
        mac: network::mac_of(&record.id)?,
        mtu: None,
        backend,
        guard,
        receive_limit: limit,
        send_limit: limit,
    }])
}

/// The disk of a volume.
pub fn volume_disk(volume: &VolumeUse, path: PathBuf) -> Disk {
    Disk {
        path,
        read_only: volume.read_only,
        // Virtio limits the serial number to 20 bytes (Virtio 1.3 §5.2.6, VIRTIO_BLK_T_GET_ID).
        serial: Some(volume.name.chars().take(20).collect()),
        ..Disk::default()
    }
}

/// The volumes that the guest mounts.
fn mounts(spec: &Spec) -> Vec<DiskMount> {
    let mount = |(index, volume): (usize, &VolumeUse)| {
        Some(DiskMount {
            device: roots::device(index + 1),
            fstype: "ext4".into(),
            mount_point: volume.mount.clone()?,
            read_only: volume.read_only,
        })
    };
    spec.disks.iter().enumerate().filter_map(mount).collect()
}

fn guest_config(record: &VmRecord, plan: &Plan) -> GuestConfig {
    let (spec, root) = (&record.spec, &plan.root);
    let mut config = GuestConfig {
        version: guest::VERSION,
        vm_id: record.id.clone(),
        hostname: Some(spec.hostname.clone().unwrap_or_else(|| record.name.clone())),
        root: roots::guest_root(spec, roots::fstype(root)),
        disks: mounts(spec),
        folders: folders::mounts(&spec.folders),
        handover: spec.init.clone(),
        main: spec.command.clone(),
        // Hidden VMs are captured or inspected after their command.
        power_off_after_main: spec.command.is_some() && !spec.hidden,
        timeline: spec.timeline,
        preload: spec.preload.clone(),
        rehearsal: spec.hidden,
        memory_mib: Some(record.memory_mib()).filter(|mib| *mib < spec.ram_mib()),
        ..GuestConfig::default()
    };
    // A guest that boots to be captured gets its identity when it is restored.
    let is_nobody = spec.hidden && matches!(plan.beginning, Beginning::Boot);
    match &plan.network {
        Some(attachment) if is_nobody => {
            network::configure_link(&mut config, &attachment.addresses)
        }
        Some(Attachment {
            addresses, names, ..
        }) => network::configure_guest(&mut config, record, addresses, names),
        None => {}
    }
    config
}

/// The kernel's command line: the default, how many vCPUs it brings up, then the user's parameters.
///
/// # Errors
///
/// If it is longer than the kernel accepts.
pub fn command_line(spec: &Spec, cpus: u8) -> Result<String> {
    use jiffy_kernel::command_line::{console_command_line, default_command_line};
    let mut line = if spec.console {
        console_command_line()
    } else {
        default_command_line()
    };
    if cpus < spec.vcpus() {
        line.push_str(&format!(" maxcpus={cpus}"));
    }
    if let Some(more) = &spec.kernel_args {
        line.push(' ');
        line.push_str(more);
    }
    if line.len() > MAX_COMMAND_LINE {
        return Err(Error::invalid(format!(
            "The kernel's command line would have {} bytes; at most {MAX_COMMAND_LINE} fit.",
            line.len()
        )));
    }
    Ok(line)
}
