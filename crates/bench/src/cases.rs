//! The cases: their setup in the machine, and their figures.

use crate::burst;
use crate::charts::{self, Chart};
use crate::data;
use crate::disk;
use crate::figure::{Clock, Figure};
use crate::folder;
use crate::host_files::{add_config, addition};
use crate::image::{self, Images};
use crate::machine::{Machine, PROBE, VMM};
use crate::network;
use crate::peers::{Boot, Peer};
use crate::plan::{Case, IMAGE, Kind, LazyMode, Outcome, RECORDING, Sample, VSOCK};
use crate::proxy;
use crate::replay;
use crate::verbs;
use anyhow::{Context, Result, ensure};
use jiffy_machine::image::build::Addition;
use jiffy_testkit::Lab;
use jiffy_wire::vmm;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

const PAGER: &str = "/lib/jiffy/jiffy-pager";
const INITRAMFS: &str = "/bench/marker.cpio";
const REPEATING: &str = "/bench/beating.cpio";
const BASE_KERNEL: &str = "/bench/vmlinux-base";
const PLAIN_KERNEL: &str = "/bench/vmlinux-plain";
const DISK: &str = "/bench/disk.img";
const RAM_MIB: u64 = 128;

/// From the spawn of the VMM to PID 1's marker; neutral kernel.
pub const SAME_KERNEL: &str = "boot/same-kernel/pid1";
/// The same with Jiffy's kernel and a VM's usual devices.
pub const OWN_KERNEL: &str = "boot/own-kernel/pid1";
/// From the spawn of the VMM to output of the restored guest; RAM in a raw file.
pub const RESTORE_128: &str = "restore/mapped/128/visible";
/// The same with four times the RAM.
pub const RESTORE_512: &str = "restore/mapped/512/visible";
/// The same with 32 times the RAM.
pub const RESTORE_4096: &str = "restore/mapped/4096/visible";
/// As for 128 MiB, but by a spare VMM, from its `TakeSpare` until its vCPUs are resumed.
pub const RESTORE_SPARE: &str = "restore/spare/128/resumed";
/// As for 128 MiB, with RAM in a compressed image. The pager has served the image before and has
/// the working set in memory.
pub const LAZY: &str = "restore/lazy/128/visible";
/// The same of the VM that is restored from a raw file.
pub const LAZY_SERIAL: &str = "restore/lazy-serial/128/visible";
/// As [`LAZY`], by a spare VMM, as in a node, from its `TakeSpare`.
pub const LAZY_SPARE: &str = "restore/lazy-spare/128/visible";
/// As [`LAZY`] for the first restore: the working set is fetched at once.
pub const LAZY_FIRST: &str = "restore/lazy-first/128/visible";
/// The same with every chunk fetched on demand.
pub const LAZY_DEMAND: &str = "restore/lazy-demand/128/visible";
/// Pause of a VM during a full capture.
pub const PAUSE: &str = "snapshot/full/128/pause";
/// From the capture of a running VM until the vCPUs of its child run.
pub const FORK: &str = "fork/1/host";

/// Kernels, as paths on the host.
pub struct Kernels<'a> {
    /// Jiffy's kernel.
    pub base: &'a Path,
    /// The neutral kernel.
    pub plain: &'a Path,
}

/// Size of Jiffy's kernel, and its instructions to PID 1 without a VMM.
///
/// # Errors
///
/// If `kernel/measure` can't be run, fails, or prints no runs and no size.
pub fn kernel_figures(kernel: &Path) -> Result<Vec<Figure>> {
    let measure = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../kernel/measure");
    let output = Command::new(&measure)
        .args(["--json", "--runs", "5"])
        .arg(kernel)
        .output()
        .with_context(|| measure.display().to_string())?;
    ensure!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr).trim()
    );
    let found: serde_json::Value = serde_json::from_slice(&output.stdout)?;
    let runs = found["runs"]
        .as_array()
        .context("kernel/measure: no runs")?;
    let instructions = runs.iter().filter_map(serde_json::Value::as_f64).collect();
    let bytes = found["bytes"]
        .as_f64()
        .context("kernel/measure: no bytes")?;
    let figures = [
        Figure::of(
            "kernel/instructions",
            "jiffy",
            Clock::Instructions,
            "instructions",
            instructions,
        ),
        Figure::of("kernel/bytes", "jiffy", Clock::Count, "bytes", vec![bytes]),
    ];
    Ok(figures.into_iter().flatten().collect())
}

/// Results on one clock.
pub struct Measured {
    /// Outcomes by case.
    pub outcomes: Vec<Outcome>,
    /// Figures that are not measured by a case in the machine.
    pub figures: Vec<Figure>,
    /// What was recorded of single runs.
    pub charts: Vec<Chart>,
}

/// Measures in machines with that clock. `wanted` selects cases by their name, a space and the
/// monitor's name; cases that take long (disk reads, shared folders, traffic) and charts also need
/// `long`.
///
/// # Errors
///
/// If a file for the machine is missing or can't be written, the machine can't be booted, or a
/// recorded run can't be replayed. What fails in a case is in [`Measured`].
pub fn measure(
    clock: Clock,
    kernels: &Kernels,
    peers: &[Peer],
    runs: u32,
    wanted: &dyn Fn(&str) -> bool,
    long: bool,
) -> Result<Measured> {
    let scratch = std::env::temp_dir().join(format!("jiffy-bench-{}", std::process::id()));
    std::fs::create_dir_all(&scratch)?;
    let measured = measure_in(&scratch, clock, kernels, peers, runs, wanted, long);
    std::fs::remove_dir_all(&scratch)?;
    measured
}

fn measure_in(
    scratch: &Path,
    clock: Clock,
    kernels: &Kernels,
    peers: &[Peer],
    runs: u32,
    wanted: &dyn Fn(&str) -> bool,
    long: bool,
) -> Result<Measured> {
    let repeating = scratch.join("beating.cpio");
    std::fs::write(&repeating, crate::marker::repeating_initramfs())?;
    let marker = scratch.join("marker.cpio");
    std::fs::write(&marker, crate::marker::initramfs())?;
    let disk = scratch.join("disk.img");
    std::fs::write(&disk, vec![0; 1 << 20])?;
    let mut files = vec![
        addition(marker, INITRAMFS),
        addition(repeating, REPEATING),
        addition(disk, DISK),
        addition(kernels.base.into(), BASE_KERNEL),
        addition(kernels.plain.into(), PLAIN_KERNEL),
        addition(probe_program()?, PROBE),
    ];
    files.extend(data::additions(scratch)?);
    let mut cases = vec![
        same_kernel(scratch, &mut files, runs)?,
        own_kernel(scratch, &mut files, runs)?,
    ];
    for peer in peers {
        if let Some(additions) = peer.additions()? {
            files.extend(additions);
            cases.push(peer_case(scratch, &mut files, *peer, runs)?);
            if *peer == Peer::Firecracker {
                cases.push(firecracker_restore(*peer, runs));
            }
        }
    }
    cases.extend(restore_cases(scratch, &mut files, runs)?);
    for (network, cold, golden) in [
        (false, verbs::RUN, verbs::RUN_GOLDEN),
        (true, verbs::RUN_NETWORK, verbs::RUN_GOLDEN_NETWORK),
    ] {
        cases.push(verbs::run_case(cold, true, network, runs));
        let runs = runs * verbs::RUN_FACTOR;
        cases.push(verbs::run_case(golden, false, network, runs));
    }
    cases.extend(verbs::detached_cases(runs));
    match clock {
        Clock::Wall => {
            cases.extend(verbs::AT_ONCE.map(verbs::at_once));
            cases.push(verbs::clones_case());
        }
        // Counters do not depend on the clock.
        _ => {
            cases.extend(verbs::count_cases(runs));
            cases.push(disk::create_root(runs));
            cases.push(disk::clone_root(runs));
            let bursts = if long { burst::cases(runs) } else { Vec::new() };
            // These cases need a filled registry.
            if [image::FIRST_ANSWER, image::PULLED, image::LAZY]
                .iter()
                .any(|case| wanted(&format!("{case} jiffy")))
                || burst::from_registry(&bursts).any(|case| wanted(&case.to_string()))
            {
                let images = Images::prepare(scratch)?;
                cases.extend(images.cases(verbs::HAS_GOLDEN, runs));
                files.extend(images.additions);
            }
            cases.extend(network::cases(runs));
            cases.push(proxy::wake_case(runs));
            files.extend(network::additions()?);
            // These are last, because they take longer than all others together.
            if long {
                cases.push(verbs::list_case());
                cases.push(verbs::sleepers_case());
                cases.push(proxy::overhead_case(runs));
                cases.extend(bursts);
                let plain = vmm_config(PLAIN_KERNEL);
                let kernels = network::Kernels {
                    plain: &plain,
                    base: BASE_KERNEL,
                };
                cases.extend(network::compared(
                    scratch, &kernels, peers, &mut files, runs,
                )?);
                cases.extend(disk::cases(scratch, &plain, peers, &mut files, runs)?);
                let own = vmm_config(BASE_KERNEL);
                cases.extend(folder::cases(scratch, &own, peers, &mut files, runs)?);
            }
        }
    }
    cases.retain(|case| wanted(&case.to_string()));
    // Peers share libraries; the archive may have each path only once.
    files.sort_by(|a, b| a.guest.cmp(&b.guest));
    files.dedup_by(|a, b| a.guest == b.guest);

    let many = cases.iter().any(|case| case.kind.needs_much_memory());
    let mut machine = Machine::new(clock, files, many);
    let (mut outcomes, mut figures, mut charts) = (Vec::new(), Vec::new(), Vec::new());
    for (index, case) in cases.iter().enumerate() {
        let begun = Instant::now();
        eprint!("  {} of {}: {case} ", index + 1, cases.len());
        let outcome = machine.measure(case);
        eprintln!("{} s", begun.elapsed().as_secs());
        if clock == Clock::Wall && case.name == LAZY && outcome.failure.is_none() {
            figures.extend(replayed(machine.lab()?, scratch)?);
        }
        if long && clock == Clock::Instructions && outcome.failure.is_none() {
            charts.extend(charts::of(machine.lab()?, case)?);
        }
        outcomes.push(outcome);
    }
    Ok(Measured {
        outcomes,
        figures,
        charts,
    })
}

/// Replays the recorded lazy restore on this host, without a VM, with the machine's pager.
fn replayed(lab: &Lab, scratch: &Path) -> Result<Vec<Figure>> {
    let fetch = |guest: &str, mode: u32| -> Result<PathBuf> {
        let name = Path::new(guest).file_name().context("a file's name")?;
        let path = scratch.join(name);
        std::fs::write(&path, lab.read(guest)?)?;
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode))?;
        Ok(path)
    };
    replay::figures(
        &fetch(PAGER, 0o700)?,
        &fetch(RECORDING, 0o600)?,
        &fetch(IMAGE, 0o600)?,
    )
}

/// The probe, in the folder of this program.
fn probe_program() -> Result<PathBuf> {
    let path = std::env::current_exe()?.with_file_name("jiffy-bench-probe");
    ensure!(
        path.is_file(),
        "{} is missing: run `make bench`",
        path.display()
    );
    Ok(path)
}

fn command_line() -> String {
    jiffy_kernel::command_line::default_command_line()
}

fn vmm_config(kernel: &str) -> vmm::VmmConfig {
    vmm::VmmConfig {
        version: vmm::VERSION,
        id: "bench".into(),
        vcpus: 1,
        memory: vmm::Memory {
            size_mib: RAM_MIB as u32,
            pages: vmm::PageSize::Small,
            prefault: false,
        },
        boot: vmm::Boot {
            kernel: kernel.into(),
            initrd: Some(INITRAMFS.into()),
            command_line: command_line(),
        },
        disks: Vec::new(),
        vsock: None,
        rng: false,
        serial: Some(vmm::Serial::Stdio),
        fw_cfg: Vec::new(),
        control: None,
        exit_record: None,
        handed: Vec::new(),
        balloon: false,
        usable_memory_mib: None,
        nets: Vec::new(),
        folders: Vec::new(),
        cpu_profile: None,
        record_activity: false,
        restore: None,
    }
}

fn vmm_case(
    name: &str,
    config: &vmm::VmmConfig,
    scratch: &Path,
    files: &mut Vec<Addition>,
    runs: u32,
) -> Result<Case> {
    let file = format!("{}.json", name.replace('/', "-"));
    let guest = add_config(scratch, &file, config, files)?;
    let argv = [VMM, "run", "--config", &guest, "--events-fd", "{events}"];
    Ok(Case {
        name: name.into(),
        monitor: "jiffy".into(),
        kind: Kind::ToMarker {
            argv: argv.map(String::from).into(),
            ram_mib: RAM_MIB,
        },
        runs,
        warm_up: 1,
    })
}

fn same_kernel(scratch: &Path, files: &mut Vec<Addition>, runs: u32) -> Result<Case> {
    vmm_case(SAME_KERNEL, &vmm_config(PLAIN_KERNEL), scratch, files, runs)
}

fn own_kernel(scratch: &Path, files: &mut Vec<Addition>, runs: u32) -> Result<Case> {
    vmm_case(OWN_KERNEL, &usual(BASE_KERNEL), scratch, files, runs)
}

/// A VM with the node's usual devices: disk, vsock, entropy, fw_cfg.
fn usual(kernel: &str) -> vmm::VmmConfig {
    vmm::VmmConfig {
        disks: vec![vmm::Disk {
            path: DISK.into(),
            read_only: true,
            direct: false,
            serial: None,
            ..vmm::Disk::default()
        }],
        vsock: Some(vmm::Vsock {
            cid: 3,
            path: VSOCK.into(),
        }),
        rng: true,
        fw_cfg: vec![vmm::FwCfgFile {
            name: jiffy_wire::guest::FW_CFG_NAME.into(),
            contents: vmm::FwCfgContents::Text("{}".into()),
        }],
        ..vmm_config(kernel)
    }
}

/// A VM with a control socket, whose guest writes its marker once or repeatedly.
fn controlled(mut config: vmm::VmmConfig, ram_mib: u32, initramfs: &str) -> vmm::VmmConfig {
    config.memory.size_mib = ram_mib;
    config.boot.initrd = Some(initramfs.into());
    config.control = Some("/tmp/bench-control.sock".into());
    config
}

fn restore_cases(scratch: &Path, files: &mut Vec<Addition>, runs: u32) -> Result<Vec<Case>> {
    let mut case = |name: &str, ram_mib, kind: fn(String) -> Kind| {
        let file = format!("{}.json", name.replace('/', "-"));
        // On one CPU a busy parent would use half of its child's time.
        let initramfs = if name == FORK { INITRAMFS } else { REPEATING };
        let devices = match name {
            // Peers restore a VM with a serial port only.
            RESTORE_128 | RESTORE_512 | RESTORE_4096 | LAZY_SERIAL => vmm_config(BASE_KERNEL),
            _ => usual(BASE_KERNEL),
        };
        let config = controlled(devices, ram_mib, initramfs);
        let guest = add_config(scratch, &file, &config, files)?;
        anyhow::Ok(Case {
            name: name.into(),
            monitor: "jiffy".into(),
            kind: kind(guest),
            runs,
            // The second restore reports the written pages; later ones use the report.
            warm_up: match name {
                LAZY | LAZY_SERIAL | LAZY_SPARE => 2,
                _ => 1,
            },
        })
    };
    Ok(vec![
        case(RESTORE_128, 128, |config| Kind::Restore {
            config,
            spare: false,
        })?,
        case(RESTORE_512, 512, |config| Kind::Restore {
            config,
            spare: false,
        })?,
        case(RESTORE_4096, 4096, |config| Kind::Restore {
            config,
            spare: false,
        })?,
        case(RESTORE_SPARE, 128, |config| Kind::Restore {
            config,
            spare: true,
        })?,
        case(LAZY, 128, |config| Kind::Lazy {
            config,
            how: LazyMode::Again,
            spare: false,
        })?,
        case(LAZY_SERIAL, 128, |config| Kind::Lazy {
            config,
            how: LazyMode::Again,
            spare: false,
        })?,
        case(LAZY_SPARE, 128, |config| Kind::Lazy {
            config,
            how: LazyMode::Again,
            spare: true,
        })?,
        case(LAZY_FIRST, 128, |config| Kind::Lazy {
            config,
            how: LazyMode::First,
            spare: false,
        })?,
        case(LAZY_DEMAND, 128, |config| Kind::Lazy {
            config,
            how: LazyMode::OnDemand,
            spare: false,
        })?,
        case(PAUSE, 128, |config| Kind::Pause { config })?,
        case(FORK, 128, |config| Kind::Fork { config })?,
    ])
}

fn peer_case(scratch: &Path, files: &mut Vec<Addition>, peer: Peer, runs: u32) -> Result<Case> {
    let config = format!("/bench/{}.json", peer.name());
    let (argv, contents) = peer.boot(&Boot {
        kernel: PLAIN_KERNEL,
        initramfs: INITRAMFS,
        command_line: &command_line(),
        ram_mib: RAM_MIB,
        tap: None,
        config: &config,
    });
    if let Some(contents) = contents {
        let host = scratch.join(format!("{}.json", peer.name()));
        std::fs::write(&host, contents)?;
        files.push(addition(host, &config));
    }
    Ok(Case {
        name: SAME_KERNEL.into(),
        monitor: peer.name().into(),
        kind: Kind::ToMarker {
            argv,
            ram_mib: RAM_MIB,
        },
        runs,
        warm_up: 1,
    })
}

/// Firecracker's restore with the kernel, marker and RAM of [`RESTORE_128`].
fn firecracker_restore(peer: Peer, runs: u32) -> Case {
    Case {
        name: RESTORE_128.into(),
        monitor: peer.name().into(),
        kind: Kind::FirecrackerRestore {
            program: format!("/bench/{}", peer.program()),
            kernel: BASE_KERNEL.into(),
            initramfs: REPEATING.into(),
            command_line: command_line(),
            ram_mib: RAM_MIB,
        },
        runs,
        warm_up: 1,
    }
}

/// Figures of measured cases. A case that failed has none.
pub fn figures(clock: Clock, outcomes: &[Outcome]) -> Vec<Figure> {
    let mut figures = Vec::new();
    for outcome in outcomes {
        let (case, monitor, samples) = (&outcome.name, &outcome.monitor, &outcome.samples);
        if case == image::FIRST_ANSWER {
            continue;
        }
        let mut counters = verbs::counters_of(case).peekable();
        if counters.peek().is_some() {
            figures.extend(counters.filter_map(|(figure, unit, counter)| {
                Figure::of_counter(figure, monitor, unit, samples, counter)
            }));
            continue;
        }
        if case == verbs::IDLE {
            figures.extend(verbs::idle_figures(monitor, samples));
            continue;
        }
        figures.extend(Figure::of_times(case, monitor, clock, samples));
        if case.starts_with(burst::PREFIX) {
            figures.extend(burst::figures(outcome));
        }
        if clock == Clock::Wall {
            continue;
        }
        if case == SAME_KERNEL {
            figures.extend(Figure::of_counter(
                "boot/vm-exits",
                monitor,
                "exits",
                samples,
                "exits",
            ));
            figures.extend(memory_overhead(
                monitor,
                samples,
                "boot/same-kernel/memory-overhead",
            ));
        }
        if case == OWN_KERNEL {
            figures.extend(memory_overhead(monitor, samples, "vmm/memory-overhead"));
            let first_run = samples
                .iter()
                .filter_map(|sample| sample.spans.get(jiffy_wire::timeline::names::FIRST_KVM_RUN))
                .map(|value| *value as f64);
            figures.extend(Figure::of(
                "vmm/exec-to-first-run",
                monitor,
                clock,
                "instructions",
                first_run.collect(),
            ));
        }
    }
    figures.extend(disk::ratios(outcomes));
    figures.extend(burst::ratios(&figures));
    if clock == Clock::Instructions {
        figures.extend(image::figures(outcomes, verbs::RUN_GOLDEN));
    }
    figures
}

fn memory_overhead(monitor: &str, samples: &[Sample], case: &str) -> Option<Figure> {
    Figure::of_counter(case, monitor, "bytes", samples, "rss_outside_ram")
}
