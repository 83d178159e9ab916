//! Guests on a real KVM. The tests are marked `#[ignore]`, because a development host may have
//! none; `make test` runs them in the machine.

#[path = "kvm/foreign.rs"]
mod foreign;

use jiffy_sys::pagemap::Pagemap;
use jiffy_sys::termination::TerminationFd;
use jiffy_vmm::boot::OpenFile;
use jiffy_vmm::capture::Capture;
use jiffy_vmm::control::ControlSocket;
use jiffy_vmm::devices::DevicesState;
use jiffy_vmm::devices::balloon::BalloonKind;
use jiffy_vmm::devices::block::BlockKind;
use jiffy_vmm::devices::entropy::EntropyKind;
use jiffy_vmm::devices::fw_cfg::FwCfgKind;
use jiffy_vmm::devices::power::PowerKind;
use jiffy_vmm::devices::rtc::RtcKind;
use jiffy_vmm::devices::serial::SerialKind;
use jiffy_vmm::devices::trace::TraceKind;
use jiffy_vmm::devices::virtio::Virtio;
use jiffy_vmm::devices::vsock::VsockKind;
use jiffy_vmm::ending::Ending;
use jiffy_vmm::hypervisor::Hypervisor;
use jiffy_vmm::memory::{GuestRam, layers};
use jiffy_vmm::sandbox::Sandbox;
use jiffy_vmm::sections::Writer;
use jiffy_vmm::watch::watch;
use jiffy_vmm::{Builder, Events, PreparedVm, StateError, VmState, Vmm};
use jiffy_wire::cpu::Wanted;
use jiffy_wire::lines;
use jiffy_wire::state::EnvelopeError;
use jiffy_wire::vmm::{
    Boot, ControlRequest, ControlResponse, Disk, ExitReason, FwCfgContents, FwCfgFile, KvmKind,
    Memory, NewGeneration, PageSize, Restore, Serial, Source, VERSION, VmmConfig, VmmEvent, Vsock,
};
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend};

const TEST_KERNEL: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/testkernel"));
/// Address of the test kernel's counter.
const COUNTER: GuestAddress = GuestAddress(0x40_0000);
const TIMEOUT: Duration = Duration::from_secs(300);

/// A VM's folder and configuration.
struct Case {
    folder: tempfile::TempDir,
    config: VmmConfig,
}

impl Case {
    fn new(command_line: &str) -> Case {
        let folder = tempfile::tempdir().unwrap();
        let kernel = folder.path().join("testkernel");
        std::fs::write(&kernel, TEST_KERNEL).unwrap();
        let config = VmmConfig {
            version: VERSION,
            id: "test".into(),
            vcpus: 1,
            memory: Memory {
                size_mib: 64,
                pages: PageSize::Small,
                prefault: false,
            },
            boot: Boot {
                kernel,
                initrd: None,
                command_line: command_line.into(),
            },
            disks: Vec::new(),
            vsock: None,
            rng: false,
            serial: Some(Serial::File(folder.path().join("console"))),
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
        };
        Case { folder, config }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn builder(&self) -> Builder {
        let events = Arc::new(Events::new(None).unwrap());
        Builder::new(self.config.clone(), events).sandbox(Sandbox::On)
    }

    fn start(&self) -> Vmm {
        let mut vmm = self.builder().build().unwrap();
        vmm.start(false).unwrap();
        vmm
    }

    /// Boots and waits for the end.
    fn ending(&self) -> Ending {
        let mut vmm = self.start();
        wait_for("the end", || vmm.process_events())
    }

    fn console(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(self.path("console")).unwrap()).into_owned()
    }
}

fn wait_for<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let until = Instant::now() + TIMEOUT;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < until, "waited in vain for {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn counter(vmm: &Vmm) -> u64 {
    vmm.ram().memory().read_obj(COUNTER).unwrap()
}

/// Waits until the guest's counter exceeds `from`.
fn counted_beyond(vmm: &mut Vmm, from: u64) -> u64 {
    wait_for("the guest to count", || {
        assert_eq!(vmm.process_events(), None);
        Some(counter(vmm)).filter(|count| *count > from)
    })
}

#[test]
#[ignore = "needs a real KVM"]
fn a_pvh_kernel_starts_in_the_specified_state() {
    let mut case = Case::new("hello exit");
    case.config.vcpus = 3;
    case.config.rng = true;
    let initrd = case.path("initrd");
    std::fs::write(&initrd, [3; 5000]).unwrap();
    case.config.boot.initrd = Some(initrd);
    let ending = case.ending();
    assert_eq!(ending.reason, ExitReason::Shutdown, "{}", ending.message);
    assert_eq!(ending.message, "the guest powered off");
    let console = case.console();
    for line in [
        "magic: 0x336ec578",
        "version: 0x1",
        "rsdp: 0x0",
        "memory: 0x0 size 0x9fc00 type 0x1",
        "memory: 0x100000 size 0x3f00000 type 0x1",
        "module: 0x3ffe000 size 0x1388 sum 0x3a98",
        "processors: 0x3",
        "command line: hello exit virtio_mmio.device=4K@0xd0000000:5",
    ] {
        assert!(
            console.lines().any(|found| found == line),
            "{line}: {console}"
        );
    }
}

#[test]
#[ignore = "needs a real KVM"]
fn memory_above_the_hole_is_in_the_map() {
    let mut case = Case::new("exit");
    case.config.memory.size_mib = 3100;
    assert_eq!(case.ending().reason, ExitReason::Shutdown);
    let console = case.console();
    assert!(
        console.contains("memory: 0x100000 size 0xbff00000 type 0x1"),
        "{console}"
    );
    assert!(
        console.contains("memory: 0x100000000 size 0x1c00000 type 0x1"),
        "{console}"
    );
}

#[test]
#[ignore = "needs a real KVM"]
fn each_way_to_end_has_its_exit_reason() {
    let ending = Case::new("quiet reset").ending();
    assert_eq!(ending.reason, ExitReason::Shutdown);
    assert_eq!(ending.message, "the guest reset");
    let ending = Case::new("quiet triplefault").ending();
    assert_eq!(ending.reason, ExitReason::GuestFault);
    assert!(
        ending.message.contains("triple fault"),
        "{}",
        ending.message
    );
}

#[test]
#[ignore = "needs a real KVM"]
fn a_pit_exists_only_for_a_guest_that_uses_it() {
    let case = Case::new("timer exit");
    assert_eq!(case.ending().reason, ExitReason::Shutdown);
    assert!(
        case.console().contains("timer counts"),
        "{}",
        case.console()
    );

    let case = Case::new("quiet count");
    let mut vmm = case.start();
    counted_beyond(&mut vmm, 0);
    vmm.pause();
    assert!(vmm.save().unwrap().chips.pit.is_none());
}

#[test]
#[ignore = "needs a real KVM"]
fn a_paused_vm_stops_and_continues_on_resume() {
    let mut case = Case::new("quiet count");
    case.config.vcpus = 4;
    let mut vmm = case.start();
    let mut last = counted_beyond(&mut vmm, 0);
    for _ in 0..100 {
        vmm.pause();
        let paused = counter(&vmm);
        assert!(paused >= last);
        for _ in 0..10 {
            assert_eq!(counter(&vmm), paused);
        }
        vmm.resume();
        last = counted_beyond(&mut vmm, paused);
    }
}

/// The guest is also notified of it, by a call that the sandbox allows.
#[test]
#[ignore = "needs a real KVM"]
fn a_vm_continues_after_a_long_pause() {
    let mut case = Case::new("quiet count");
    case.config.vcpus = 2;
    let mut vmm = case.start();
    counted_beyond(&mut vmm, 0);
    vmm.pause();
    let paused = counter(&vmm);
    std::thread::sleep(Duration::from_millis(1100));
    vmm.resume();
    counted_beyond(&mut vmm, paused);
}

/// The test kernel counts to this between two marks, after one at its start.
const COUNT_MARK: u64 = 0x100_0000;

fn with_every_device(case: &mut Case) {
    case.config.vcpus = 2;
    case.config.rng = true;
    case.config.balloon = true;
    let disk = case.path("disk");
    std::fs::write(&disk, vec![0; 1 << 20]).unwrap();
    case.config.disks.push(Disk {
        path: disk,
        read_only: false,
        direct: false,
        serial: Some("one".into()),
        ..Disk::default()
    });
    case.config.vsock = Some(Vsock {
        cid: 3,
        path: case.path("vsock.sock"),
    });
}

fn contents(file: &File) -> Vec<u8> {
    let mut bytes = vec![0; file.metadata().unwrap().len() as usize];
    std::os::unix::fs::FileExt::read_exact_at(file, &mut bytes, 0).unwrap();
    bytes
}

/// The restore configuration of a child of this capture.
fn from(capture: &Capture) -> Restore {
    let mut fds = vec![capture.state.as_raw_fd(), capture.layout.as_raw_fd()];
    fds.extend(capture.layers.iter().map(|layer| layer.as_raw_fd()));
    Restore::of_captured(&fds).unwrap()
}

#[test]
#[ignore = "needs a real KVM"]
fn a_captured_vm_continues_in_a_new_one() {
    let mut case = Case::new("quiet count");
    with_every_device(&mut case);
    let mut vmm = case.start();
    counted_beyond(&mut vmm, 1000);
    assert!(vmm.save().is_err(), "it runs");
    let capture = vmm.capture(false).unwrap();
    let count = counter(&vmm);
    drop(vmm);

    let bytes = contents(&capture.state);
    let mut state = VmState::decode(&bytes).unwrap();
    assert_eq!(state.encode(), bytes, "a state survives its own format");
    // Marks are counted from zero again.
    let trace = state.devices.of_mut::<TraceKind>().next().unwrap();
    let written = std::mem::take(&mut trace.written);
    assert_eq!(written, 1 + count / COUNT_MARK, "at {count}");
    case.config.restore = Some(from(&capture));
    let mut vmm = case.builder().build().unwrap();
    vmm.start(true).unwrap();
    let again = vmm.save().unwrap();
    let sections = |state: &DevicesState| {
        let mut writer = Writer::default();
        state.write(&mut writer);
        writer.finish()
    };
    assert!(sections(&again.devices) == sections(&state.devices));
    for (again, before) in again.vcpus.iter().zip(&state.vcpus) {
        assert_eq!(again.regs, before.regs);
        assert_eq!(again.sregs, before.sregs);
        assert_eq!(again.mp_state, before.mp_state);
    }
    assert_eq!(counter(&vmm), count, "nothing ran yet");
    vmm.resume();
    counted_beyond(&mut vmm, count);
}

/// The first entry is then the last notice for a long time.
#[test]
#[ignore = "needs a real KVM"]
fn a_vm_without_devices_settles_when_it_runs() {
    let case = Case::new("quiet count");
    let events = Arc::new(Events::new(None).unwrap());
    let builder = Builder::new(case.config.clone(), events).sandbox(Sandbox::Off);
    let mut vmm = builder.build().unwrap();
    vmm.start(false).unwrap();
    let (settled, waits) = std::sync::mpsc::channel::<()>();
    std::thread::spawn(move || {
        if waits.recv_timeout(TIMEOUT) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
            eprintln!("it never settled");
            std::process::abort();
        }
    });
    vmm.settle().unwrap();
    drop(settled);
    counted_beyond(&mut vmm, 0);
}

#[test]
#[ignore = "needs a real KVM"]
fn a_vm_saved_in_an_earlier_format_continues() {
    let mut case = Case::new("quiet count");
    with_every_device(&mut case);
    let mut vmm = case.start();
    counted_beyond(&mut vmm, 1000);
    let capture = vmm.capture(false).unwrap();
    let count = counter(&vmm);
    drop(vmm);

    // Version 1: no release, a checksum of the body alone, and one tree.
    let now = contents(&capture.state);
    let state = VmState::decode(&now).unwrap();
    let (chips, devices) = (state.chips, state.devices);
    let body = postcard::to_allocvec(&(
        state.memory_size,
        state.vcpus,
        (chips.pic_master, chips.pic_slave, chips.ioapic),
        (chips.pit, chips.clock_ns),
        devices.of::<Virtio<BlockKind>>().collect::<Vec<_>>(),
        devices.of::<Virtio<VsockKind>>().next(),
        devices.of::<Virtio<EntropyKind>>().next(),
        devices.of::<Virtio<BalloonKind>>().next(),
        devices.of::<SerialKind>().next(),
        (
            devices.of::<FwCfgKind>().next().unwrap(),
            devices.of::<PowerKind>().next().unwrap(),
            devices.of::<RtcKind>().next().unwrap(),
            devices.of::<TraceKind>().next().unwrap(),
        ),
    ))
    .unwrap();
    let mut before = now[..8].to_vec();
    before.extend(1_u32.to_le_bytes());
    before.extend(crc_fast::crc32_iscsi(&body).to_le_bytes());
    before.extend((body.len() as u64).to_le_bytes());
    before.extend(body);
    let state = case.path("state");
    std::fs::write(&state, before).unwrap();
    let mut restore = from(&capture);
    restore.state = Source::Path(state);
    case.config.restore = Some(restore);
    let mut vmm = case.start();
    counted_beyond(&mut vmm, count);
}

#[test]
#[ignore = "needs a real KVM"]
fn a_state_with_msrs_that_are_no_longer_saved_is_restored() {
    const IA32_PERF_CAPABILITIES: u32 = 0x345;
    const IA32_MTRR_DEF_TYPE: u32 = 0x2ff;
    const ECX_PDCM: u32 = 1 << 15;
    let mut case = Case::new("quiet count");
    let mut vmm = case.start();
    counted_beyond(&mut vmm, 1000);
    let capture = vmm.capture(false).unwrap();
    let count = counter(&vmm);
    drop(vmm);
    let mut state = VmState::decode(&contents(&capture.state)).unwrap();
    let vcpu = &mut state.vcpus[0];
    let of = |index| vcpu.msrs.iter().find(|msr| msr.index == index);
    assert!(of(IA32_PERF_CAPABILITIES).is_none());
    // The values that a PC's firmware sets.
    assert_eq!(of(IA32_MTRR_DEF_TYPE).unwrap().data, 0xc06);
    let leaf_1 = vcpu.cpuid.iter().find(|leaf| leaf.function == 1).unwrap();
    assert_eq!(leaf_1.ecx & ECX_PDCM, 0);

    // As KVM with performance counters lists it, and refuses it.
    let mut refused = vcpu.msrs[0];
    (refused.index, refused.data) = (IA32_PERF_CAPABILITIES, 0x2000);
    vcpu.msrs.insert(0, refused);
    let file = case.path("state");
    std::fs::write(&file, state.encode()).unwrap();
    let mut restore = from(&capture);
    restore.state = Source::Path(file);
    case.config.restore = Some(restore);
    let mut vmm = case.start();
    counted_beyond(&mut vmm, count);
    let again = vmm.capture(false).unwrap();
    let again = VmState::decode(&contents(&again.state)).unwrap();
    let mut msrs = again.vcpus[0].msrs.iter();
    let types = msrs.find(|msr| msr.index == IA32_MTRR_DEF_TYPE);
    assert_eq!(types.unwrap().data, 0xc06);
}

#[test]
#[ignore = "needs a real KVM"]
fn missing_processor_features_of_a_guest_are_named() {
    let mut case = Case::new("quiet count");
    let mut vmm = case.builder().build().unwrap();
    vmm.start(true).unwrap();
    let capture = vmm.capture(false).unwrap();
    let profile = vmm.cpu_profile().unwrap().clone();
    drop(vmm);
    assert!(profile.features().iter().any(|name| name == "sse2"));
    let bytes = contents(&capture.state);
    let file = case.path("state");
    let mut restore = from(&capture);
    restore.state = Source::Path(file.clone());
    case.config.restore = Some(restore);
    let refused = |change: &dyn Fn(&mut VmState)| {
        let mut state = VmState::decode(&bytes).unwrap();
        change(&mut state);
        std::fs::write(&file, state.encode()).unwrap();
        let error = case.builder().build().err().unwrap();
        assert!(error.hint().unwrap().contains("restore it on a host"));
        // The same with a VM that was prepared ahead.
        let ahead = PreparedVm::ahead(Sandbox::Off, None).unwrap();
        let again = case.builder().prepared(Some(ahead)).build();
        assert_eq!(again.err().unwrap().to_string(), error.to_string());
        error.to_string()
    };
    let leaf = |state: &mut VmState, leaf: u32, change: &dyn Fn(&mut [u32; 2])| {
        let mut leaves = state.vcpus[0].cpuid.iter_mut();
        let entry = leaves.find(|entry| entry.function == leaf).unwrap();
        let mut registers = [entry.ebx, entry.ecx];
        change(&mut registers);
        [entry.ebx, entry.ecx] = registers;
    };
    // Memory encryption and key locker, which no KVM exposes.
    assert_eq!(
        refused(&|state| leaf(state, 7, &|[_, ecx]| *ecx |= 1 << 13 | 1 << 23)),
        "this host can't continue the saved VM: it lacks tme, kl"
    );
    let vendor = &profile.vendor;
    let other = "Xeon".to_owned() + &vendor[4..];
    assert_eq!(
        refused(&|state| leaf(state, 0, &|[ebx, _]| *ebx = u32::from_le_bytes(*b"Xeon"))),
        format!(
            "this host can't continue the saved VM: it lacks a processor of {other} (this is one of {vendor})"
        )
    );
    if Hypervisor::open().unwrap().has_tsc_scaling() {
        return;
    }
    let slow = refused(&|state| state.vcpus[0].tsc_khz = Some(1000));
    assert!(
        slow.contains("it lacks a time stamp counter of 1000 kHz"),
        "{slow}"
    );
}

#[test]
#[ignore = "needs a real KVM"]
fn a_guest_has_only_the_features_of_its_profile() {
    let mut case = Case::new("quiet count");
    case.config.vcpus = 2;
    case.config.cpu_profile = Some(Wanted::Named("x86-64-v2".into()));
    let mut vmm = case.start();
    counted_beyond(&mut vmm, 1000);
    let capture = vmm.capture(false).unwrap();
    let count = counter(&vmm);
    let profile = vmm.cpu_profile().unwrap().clone();
    drop(vmm);
    let features = profile.features();
    let has = |wanted: &str| features.iter().any(|name| name == wanted);
    assert!(has("popcnt") && has("kvm_clocksource2"), "{features:?}");
    assert!(
        !has("xsave") && !has("avx2") && !has("smep"),
        "{features:?}"
    );

    case.config.restore = Some(from(&capture));
    let mut vmm = case.start();
    counted_beyond(&mut vmm, count);
    drop(vmm);

    case.config.restore = None;
    // A profile of one guest can be given to another.
    case.config.cpu_profile = Some(Wanted::Given(Box::new(profile.clone())));
    let mut vmm = case.start();
    vmm.pause();
    vmm.save().unwrap();
    assert_eq!(vmm.cpu_profile().unwrap().features(), features);
    drop(vmm);
    let mut more = profile;
    let mut leaves = more.cpuid.iter_mut();
    let leaf = leaves.find(|entry| entry.leaf == 7 && entry.index == 0);
    leaf.unwrap().registers[2] |= 1 << 13;
    case.config.cpu_profile = Some(Wanted::Given(Box::new(more)));
    let error = case.builder().build().err().unwrap();
    assert_eq!(
        error.to_string(),
        "this host can't give a VM the CPU profile that was given: it lacks tme"
    );
}

#[test]
#[ignore = "needs a real KVM"]
fn a_held_vm_begins_with_its_new_configuration() {
    let mut case = Case::new("quiet count");
    with_every_device(&mut case);
    case.config.fw_cfg.push(FwCfgFile {
        name: "opt/jiffy/config".into(),
        contents: FwCfgContents::Text("of the parent".into()),
    });
    let mut vmm = case.start();
    counted_beyond(&mut vmm, 1000);
    let capture = vmm.capture(false).unwrap();
    let count = counter(&vmm);
    drop(vmm);

    case.config.restore = Some(from(&capture));
    let mut vmm = case.builder().build().unwrap();
    vmm.hold().unwrap();
    assert!(vmm.is_held() && vmm.is_paused());
    vmm.resume();
    assert_eq!(counter(&vmm), count, "nothing runs before it begins");
    vmm.pause();
    let mut own = case.config.clone();
    own.fw_cfg[0].contents = FwCfgContents::Text("of this one, and longer".into());
    vmm.begin(&own).unwrap();
    assert!(!vmm.is_held() && vmm.is_paused());
    assert_eq!(counter(&vmm), count, "nor while it is paused");
    vmm.resume();
    counted_beyond(&mut vmm, count);
    vmm.pause();
    let devices = vmm.save().unwrap().devices;
    let files = &devices.of::<FwCfgKind>().next().unwrap().files;
    let config = files.iter().find(|file| file.name == "opt/jiffy/config");
    assert_eq!(config.unwrap().contents, b"of this one, and longer");
    vmm.resume();
    let now = counter(&vmm);
    counted_beyond(&mut vmm, now);
}

#[test]
#[ignore = "needs a real KVM"]
fn a_vm_is_built_from_a_prepared_vm() {
    let mut case = Case::new("quiet count");
    with_every_device(&mut case);
    case.config.vcpus = 2;
    let (own, other) = (case.config.boot.kernel.clone(), case.path("other"));
    std::fs::write(&other, TEST_KERNEL).unwrap();
    let ahead_with = |kernel: &Path| {
        let kernel = OpenFile::of(File::open(kernel).unwrap()).unwrap();
        let mut prepared = PreparedVm::ahead(Sandbox::On, Some(kernel)).unwrap();
        while prepared.prepare_next() {}
        Some(prepared)
    };
    let ahead = || Some(PreparedVm::ahead(Sandbox::On, None).unwrap());
    // RAM has this kernel already, another one, or none.
    for prepared in [ahead_with(&own), ahead_with(&other), ahead()] {
        let mut vmm = case.builder().prepared(prepared).build().unwrap();
        vmm.start(false).unwrap();
        counted_beyond(&mut vmm, 1000);
    }
    let mut vmm = case.builder().prepared(ahead()).build().unwrap();
    vmm.start(false).unwrap();
    counted_beyond(&mut vmm, 1000);
    let capture = vmm.capture(false).unwrap();
    let count = counter(&vmm);
    drop(vmm);

    case.config.restore = Some(from(&capture));
    let mut vmm = case.builder().prepared(ahead()).build().unwrap();
    assert_eq!(counter(&vmm), count);
    vmm.start(false).unwrap();
    counted_beyond(&mut vmm, count);
}

#[test]
#[ignore = "needs a real KVM"]
fn time_stamp_counters_continue_after_a_restore() {
    const IA32_TIME_STAMP_COUNTER: u32 = 0x10;
    let counters = |state: &VmState| -> Vec<u64> {
        let msrs = state.vcpus.iter().flat_map(|vcpu| &vcpu.msrs);
        let counters = msrs.filter(|msr| msr.index == IA32_TIME_STAMP_COUNTER);
        counters.map(|msr| msr.data).collect()
    };
    let mut case = Case::new("quiet count");
    case.config.vcpus = 2;
    let mut vmm = case.builder().build().unwrap();
    vmm.start(false).unwrap();
    counted_beyond(&mut vmm, 1000);
    let capture = vmm.capture(false).unwrap();
    drop(vmm);
    let state = VmState::decode(&contents(&capture.state)).unwrap();
    let khz = u64::from(state.vcpus[0].tsc_khz.unwrap());
    let saved = counters(&state)[0];

    case.config.restore = Some(from(&capture));
    let ahead = PreparedVm::ahead(Sandbox::Off, None).unwrap();
    // Its counter is then far ahead of the restored one's.
    std::thread::sleep(Duration::from_secs(3));
    for prepared in [Some(ahead), None] {
        let begun = Instant::now();
        let mut vmm = case.builder().prepared(prepared).build().unwrap();
        vmm.start(true).unwrap();
        let restored = counters(&vmm.save().unwrap());
        let elapsed = begun.elapsed().as_micros() as u64 * khz / 1000;
        assert_eq!(restored.len(), 2);
        for counter in restored {
            // The frequency is KVM's measurement.
            let expected = saved..saved + 2 * elapsed;
            assert!(expected.contains(&counter), "{counter} of {expected:?}");
        }
    }
}

#[test]
#[ignore = "needs a real KVM"]
fn a_damaged_or_foreign_state_is_refused() {
    let case = Case::new("quiet count");
    let mut vmm = case.builder().build().unwrap();
    vmm.start(true).unwrap();
    let capture = vmm.capture(true).unwrap();
    assert!(vmm.is_paused(), "a VM that was paused stays so");
    let bytes = contents(&capture.state);
    drop(vmm);

    let refused = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = bytes.clone();
        change(&mut bytes);
        VmState::decode(&bytes).unwrap_err()
    };
    let magic = StateError::Envelope(EnvelopeError::Magic);
    assert_eq!(refused(&|bytes| bytes[0] = 0), magic);
    assert_eq!(refused(&|bytes| bytes.truncate(10)), magic);
    assert!(matches!(
        refused(&|bytes| bytes[8] = 9),
        StateError::Envelope(EnvelopeError::Version { version: 9, .. })
    ));
    assert_eq!(
        refused(&|bytes| *bytes.last_mut().unwrap() ^= 1),
        StateError::Envelope(EnvelopeError::Checksum)
    );
    assert!(matches!(
        refused(&|bytes| bytes.push(0)),
        StateError::Envelope(EnvelopeError::Length { .. })
    ));

    let mut other = Case::new("quiet count");
    other.config.restore = Some(from(&capture));
    other.config.vcpus = 2;
    let error = other.builder().build().err().unwrap();
    assert_eq!(
        error.to_string(),
        "the saved VM has 1 vCPUs, but the configuration has 2"
    );
}

#[test]
#[ignore = "needs a real KVM"]
fn forks_of_forks_run_independently() {
    let mut case = Case::new("quiet count");
    with_every_device(&mut case);
    let mut family = vec![case.start()];
    counted_beyond(&mut family[0], 1000);
    for round in 0..12 {
        let parent = round * 5 % family.len();
        let before = counter(&family[parent]);
        let capture = family[parent].capture(true).unwrap();
        assert!(!family[parent].is_paused());
        let child = Case::new("quiet count");
        let mut config = case.config.clone();
        config.restore = Some(from(&capture));
        config.vsock = Some(Vsock {
            cid: 10 + round as u64,
            path: child.path("vsock.sock"),
        });
        config.disks[0].path = child.path("disk");
        std::fs::copy(case.path("disk"), child.path("disk")).unwrap();
        let events = Arc::new(Events::new(None).unwrap());
        let mut vmm = Builder::new(config, events).build().unwrap();
        drop(capture);
        let begun = counter(&vmm);
        assert!(begun >= before);
        vmm.start(false).unwrap();
        counted_beyond(&mut vmm, begun);
        if round % 4 == 3 {
            family.remove(parent);
        }
        family.push(vmm);
    }
    for vmm in &mut family {
        let count = counter(vmm);
        counted_beyond(vmm, count);
    }
}

#[test]
#[ignore = "needs a real KVM"]
fn repeated_captures_of_a_running_guest_are_complete() {
    let mut case = Case::new("quiet count");
    with_every_device(&mut case);
    let mut vmm = case.start();
    for round in 0..12 {
        let count = counter(&vmm);
        counted_beyond(&mut vmm, count);
        let by_monitor = GuestAddress(0x100_0000 + round % 3 * 4096);
        vmm.ram().memory().write_obj(round, by_monitor).unwrap();
        let capture = vmm.capture(false).unwrap();
        let files = capture.layers.iter();
        let child = GuestRam::from_layers(
            layers::assemble(
                files.map(|file| file.try_clone().unwrap()).collect(),
                Some(serde_json::from_slice(&contents(&capture.layout)).unwrap()),
                vmm.ram().size(),
            )
            .unwrap(),
            vmm.ram().size(),
        )
        .unwrap();
        assert_eq!(differing_pages(vmm.ram(), &child), [0_u64; 0]);
        // From the third capture on, copied pages stay this process's own: later captures use KVM's
        // log.
        assert_eq!(own_pages(vmm.ram()) > 0, round >= 2, "capture {round}");
        assert!(capture.copied_bytes < 1 << 20, "{}", capture.copied_bytes);
        vmm.resume();
        vmm.prepare_captures();
        assert!(!vmm.ram().wants_log());
    }
}

fn differing_pages(one: &GuestRam, other: &GuestRam) -> Vec<u64> {
    let page = |ram: &GuestRam, at| {
        let mut bytes = [0; 4096];
        ram.memory()
            .read_slice(&mut bytes, GuestAddress(at))
            .unwrap();
        bytes
    };
    let mut all = (0..one.size()).step_by(4096).collect::<Vec<_>>();
    all.retain(|at| page(one, *at) != page(other, *at));
    all
}

fn own_pages(ram: &GuestRam) -> usize {
    let region = ram.memory().iter().next().unwrap();
    let start = region.as_ptr() as u64;
    let pages = Pagemap::open().unwrap();
    pages.own_pages(start..start + ram.size()).unwrap().len()
}

#[test]
#[ignore = "needs a real KVM"]
fn a_restored_guest_that_never_renews_its_identity_is_ended() {
    let mut case = Case::new("quiet count");
    let mut vmm = case.start();
    counted_beyond(&mut vmm, 0);
    let capture = vmm.capture(false).unwrap();
    drop(vmm);
    let mut restore = from(&capture);
    restore.generation = Some(NewGeneration {
        id: "4ff3f4c9-3c6a-4bb5-8f0e-0d4b8a4cf0d6".into(),
        start_main: false,
        deadline_ms: 50,
    });
    case.config.restore = Some(restore);
    let ending = case.ending();
    assert_eq!(ending.reason, ExitReason::GuestFault);
    assert!(
        ending.message.contains("within 50 ms"),
        "{}",
        ending.message
    );
}

#[test]
#[ignore = "needs a real KVM"]
fn kvm_exit_counters_are_read() {
    let case = Case::new("hlt");
    let mut vmm = case.start();
    wait_for("the guest to sleep", || {
        vmm.process_events();
        case.console().contains("asleep").then_some(())
    });
    let stats = vmm.stats().unwrap();
    // Every character of the console caused an exit.
    assert!(stats["io_exits"] >= 200, "{stats:?}");
    assert!(stats["exits"] >= stats["io_exits"], "{stats:?}");
}

/// Sends one request and returns the answer.
fn ask(path: &Path, request: ControlRequest) -> ControlResponse {
    let mut stream = UnixStream::connect(path).unwrap();
    let line = lines::encode(&request).unwrap();
    stream.write_all(&line).unwrap();
    let mut answer = String::new();
    BufReader::new(stream).read_line(&mut answer).unwrap();
    serde_json::from_str(&answer).unwrap()
}

/// Asks a VM to stop when it is dropped, and accepts any answer.
struct StopOnDrop<'a>(&'a Path);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        let stopped = UnixStream::connect(self.0).and_then(|mut stream| {
            stream.write_all(b"\"stop\"\n")?;
            stream.read_to_end(&mut Vec::new())
        });
        drop(stopped);
    }
}

#[test]
#[ignore = "needs a real KVM"]
fn the_control_socket_pauses_resumes_and_stops() {
    let case = Case::new("quiet count");
    let path = case.path("control.sock");
    let termination = TerminationFd::block().unwrap();
    let mut vmm = case.start();
    let mut control = Some(ControlSocket::listen(&path).unwrap());
    let client = std::thread::spawn(move || {
        // Whatever happens to the client, the VM ends.
        let _stop = StopOnDrop(&path);
        let paused = |path: &Path| match ask(path, ControlRequest::Status) {
            ControlResponse::Status { id, paused, .. } => {
                assert_eq!(id, "test");
                paused
            }
            other => panic!("{other:?}"),
        };
        assert!(!paused(&path));
        assert_eq!(ask(&path, ControlRequest::Pause), ControlResponse::Ok);
        assert_eq!(ask(&path, ControlRequest::Pause), ControlResponse::Ok);
        assert!(paused(&path));
        assert_eq!(ask(&path, ControlRequest::Resume), ControlResponse::Ok);
        assert!(!paused(&path));
        wait_for("the guest to have left once", || {
            match ask(&path, ControlRequest::Stats) {
                ControlResponse::Stats(stats) => (stats["exits"] > 0).then_some(()),
                other => panic!("{other:?}"),
            }
        });
        assert_eq!(ask(&path, ControlRequest::Stop), ControlResponse::Ok);
    });
    let ending = watch(
        &mut vmm,
        Path::new("vmm.json"),
        &termination,
        &mut control,
        None,
    );
    // The client's further requests get no answer.
    drop(control);
    client.join().unwrap();
    assert_eq!(ending.reason, ExitReason::Stopped);
}

#[test]
#[ignore = "needs a real KVM"]
fn events_are_the_steps_in_order_then_the_guests_marks() {
    let case = Case::new("quiet count");
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    let events = Arc::new(Events::new(Some(File::from(writer))).unwrap());
    let mut vmm = Builder::new(case.config.clone(), events).build().unwrap();
    vmm.start(false).unwrap();
    counted_beyond(&mut vmm, 0);
    drop(vmm);
    let mut text = String::new();
    File::from(reader).read_to_string(&mut text).unwrap();
    let events: Vec<VmmEvent> = text
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let names: Vec<&str> = events
        .iter()
        .filter_map(|event| match event {
            VmmEvent::Span { name, .. } if name != "first KVM_RUN" => Some(name.as_str()),
            _ => None,
        })
        .collect();
    assert_eq!(
        names,
        [
            "KVM VM created",
            "memory",
            "vCPUs",
            "devices",
            "kernel loaded"
        ]
    );
    let first_run = events.iter().find_map(|event| match event {
        VmmEvent::Span { name, start_ns, .. } if name == "first KVM_RUN" => Some(*start_ns),
        _ => None,
    });
    let entry = events.iter().find_map(|event| match event {
        VmmEvent::Mark { value: 1, at_ns } => Some(*at_ns),
        _ => None,
    });
    assert!(first_run.unwrap() < entry.unwrap());
}

#[test]
#[ignore = "needs a real KVM"]
fn recorded_activity_has_each_exit_and_kvms_own_counts() {
    let mut case = Case::new("quiet count");
    case.config.record_activity = true;
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    let events = Arc::new(Events::new(Some(File::from(writer))).unwrap());
    let builder = Builder::new(case.config.clone(), events.clone()).sandbox(Sandbox::On);
    let mut vmm = builder.build().unwrap();
    vmm.start(false).unwrap();
    counted_beyond(&mut vmm, 0);
    drop(vmm);
    events.report_activity();
    events.flush();
    drop(events);
    let mut text = String::new();
    File::from(reader).read_to_string(&mut text).unwrap();
    let activities: Vec<_> = text
        .lines()
        .filter_map(|line| match serde_json::from_str(line).unwrap() {
            VmmEvent::Activity(activity) if activity.thread == "vcpu 0" => Some(activity),
            _ => None,
        })
        .collect();
    let has = |name: &str, of: fn(&jiffy_wire::vmm::Activity) -> &[(u32, u64, u64)]| {
        activities.iter().any(|activity| {
            let mut items = of(activity).iter();
            items.any(|(index, ..)| activity.names[*index as usize] == name)
        })
    };
    // The test kernel writes its mark to the trace port.
    assert!(
        has("exit: port write", |activity| &activity.spans),
        "{text}"
    );
    assert!(has("exits", |activity| &activity.counts), "{text}");
    assert!(!jiffy_sys::activity::is_recorded());
}

#[test]
#[ignore = "needs a real KVM"]
fn a_guest_runs_in_huge_pages() {
    for (pages, kib, size_mib, needed) in [
        (PageSize::Huge2M, 2 << 10, 64, 32),
        (PageSize::Huge1G, 1 << 20, 1 << 10, 1),
    ] {
        let pool = format!("/sys/kernel/mm/hugepages/hugepages-{kib}kB/nr_hugepages");
        std::fs::write(&pool, needed.to_string()).unwrap();
        let mut case = Case::new("quiet exit");
        case.config.memory.pages = pages;
        case.config.memory.size_mib = size_mib;
        assert_eq!(case.ending().reason, ExitReason::Shutdown);
        std::fs::write(&pool, (needed - 1).to_string()).unwrap();
        let error = case.builder().build().err().unwrap();
        let sentence = format!("{needed} free huge pages of {} MiB are needed", kib >> 10);
        assert!(error.to_string().contains(&sentence), "{error}");
        assert!(error.hint().unwrap().contains(&format!("echo {needed} >")));
        std::fs::write(&pool, "0").unwrap();
    }
}

#[test]
#[ignore = "needs a real KVM"]
fn the_probe_recognizes_a_real_kvm() {
    let probe = jiffy_vmm::probe::probe();
    assert_eq!(probe.kind, KvmKind::Real, "{probe:?}");
    assert_eq!(probe.syscall_enters_ring0, Some(true));
}
