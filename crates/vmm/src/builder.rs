//! Builds a VM step by step.

use crate::boot::preloaded::Preloaded;
use crate::boot::{self, BootError, Entry, Images, OpenFile, calls};
use crate::cpu::cpuid::{self, Host};
use crate::cpu::profile::{HostCpu, ProfileError};
use crate::cpu::tsc;
use crate::cpu::tsc::SharedOffset;
use crate::devices::{DeviceArgs, DeviceError, Devices, DevicesState, registry, wiring};
use crate::error::StartError;
use crate::events::Events;
use crate::gate::Gate;
use crate::hypervisor::{Hypervisor, HypervisorError};
use crate::mailbox::Mailbox;
use crate::memory::{GuestRam, RamAhead};
use crate::pager::{PagedMemory, PagerThread, Supply};
use crate::restore;
use crate::sandbox::Sandbox;
use crate::state::VmState;
use crate::stats::StatsFile;
use crate::vcpu::{MAX_VCPUS, Vcpu, VcpuState};
use crate::vmm::{FirstEntry, NotedCalls, Parts, Vmm};
use crate::workers::{IdleThreads, ThreadStarter};
use jiffy_devices::virtio::device::Workers;
use jiffy_devices::virtio::mmio::Wires;
use jiffy_sys::{activity, fds, kick};
use jiffy_wire::guest::GENERATION_NAME;
use jiffy_wire::timeline::names;
use jiffy_wire::vmm::{Extent, PageSize, Restore, SavedMemory, VmmConfig};
use kvm_bindings::CpuId;
use kvm_ioctls::VmFd;
use std::io;
use std::sync::Arc;

/// Builds a [`Vmm`] from a configuration.
pub struct Builder {
    config: VmmConfig,
    events: Arc<Events>,
    sandbox: Sandbox,
    prepared: Option<PreparedVm>,
}

impl Builder {
    /// A builder for this VM. Spans of its steps go to `events`.
    pub fn new(config: VmmConfig, events: Arc<Events>) -> Builder {
        Builder {
            config,
            events,
            sandbox: Sandbox::On,
            prepared: None,
        }
    }

    /// Uses what [`PreparedVm::ahead`] has prepared.
    pub fn prepared(mut self, prepared: Option<PreparedVm>) -> Builder {
        self.prepared = prepared;
        self
    }

    /// Sets whether the VM's threads are confined; by default they are.
    pub fn sandbox(mut self, sandbox: Sandbox) -> Builder {
        self.sandbox = sandbox;
        self
    }

    /// Builds the VM, ready to boot its kernel or to continue from a capture. Nothing runs yet.
    ///
    /// # Errors
    ///
    /// The host or the files that the configuration names can't provide what it asks for.
    pub fn build(mut self) -> Result<Vmm, StartError> {
        if !(1..=MAX_VCPUS).contains(&self.config.vcpus) {
            return Err(StartError::Vcpus(self.config.vcpus));
        }
        if self.config.record_activity {
            activity::record();
        }
        if self.prepared.is_none() {
            prepare_process(self.sandbox)?;
        }
        let mut prepared = self.prepared.take();
        let threads = Threads::start(prepared.as_mut(), &self.config, self.sandbox)?;
        match self.config.restore.take() {
            None => self.boot(prepared, threads),
            Some(restore) => self.restore(&restore, prepared, threads),
        }
    }

    /// Builds a VM that boots.
    fn boot(self, prepared: Option<PreparedVm>, threads: Threads) -> Result<Vmm, StartError> {
        let (config, events) = (&self.config, &self.events);
        let mut base = events.step(names::KVM_VM_CREATED, || {
            PreparedVm::prepared_or_new(prepared)
        })?;
        base.hypervisor.check_vcpus(config.vcpus)?;
        let kernel = boot::open(&config.boot.kernel)?;
        let (ram, is_preloaded) =
            events.step(names::MEMORY, || self.create_memory(&mut base, &kernel))?;
        let vcpus = events.step(names::VCPUS, || create_vcpus(config, &mut base))?;
        let devices = events.step(names::DEVICES, || {
            self.create_devices(&mut base, &ram, &threads, None)
        })?;
        let entry = events.step(names::KERNEL_LOADED, || {
            self.load_kernel(&kernel, is_preloaded, &ram, &devices)
        })?;
        vcpus[0].enter_at(&entry)?;
        let clock = match config.record_activity {
            true => vcpus[0].tsc_clock(),
            false => None,
        };
        let noted_calls = clock.map(|clock| NotedCalls { kernel, clock });
        Ok(self.assemble(
            base,
            threads,
            Built {
                ram,
                vcpus,
                devices,
                supply: Supply::NoPager,
                gate: Gate::default(),
                noted_calls,
                first_entry: FirstEntry {
                    moment: names::FIRST_KVM_RUN,
                    first_writes: Vec::new(),
                },
            },
        ))
    }

    /// Builds a VM from a capture.
    fn restore(
        self,
        restore: &Restore,
        prepared: Option<PreparedVm>,
        threads: Threads,
    ) -> Result<Vmm, StartError> {
        let (config, events) = (&self.config, &self.events);
        let state = events.step(names::STATE_LOADED, || restore::state(restore, config))?;
        let mut base = events.step(names::KVM_VM_CREATED, || {
            let mut base = PreparedVm::prepared_or_new(prepared)?;
            base.check(&state.vcpus[0])?;
            Ok::<_, StartError>(base)
        })?;
        base.hypervisor.check_vcpus(config.vcpus)?;
        let mut memory = events.step(names::MEMORY_ATTACHED, || {
            self.attach_memory(restore, &base.vm)
        })?;
        let rest = self.restore_rest(restore, state, &mut base, &memory, &threads);
        let (vcpus, devices) = match rest {
            Ok(rest) => rest,
            Err(error) => {
                // Lost memory may have caused this error, and is then reported instead.
                memory.supply.take_over()?;
                return Err(error);
            }
        };
        Ok(self.assemble(
            base,
            threads,
            Built {
                ram: memory.ram,
                vcpus,
                devices,
                supply: memory.supply,
                gate: Gate::of(restore),
                noted_calls: None,
                first_entry: FirstEntry {
                    moment: names::VCPUS_RESUMED,
                    first_writes: memory.first_writes,
                },
            },
        ))
    }

    /// The steps that may touch memory which the pager still has to fill.
    fn restore_rest(
        &self,
        restore: &Restore,
        state: VmState,
        base: &mut PreparedVm,
        memory: &CapturedMemory,
        threads: &Threads,
    ) -> Result<(Vec<Vcpu>, Devices), StartError> {
        let events = &self.events;
        let vcpus = events.step(names::VCPUS, || restore_vcpus(&state.vcpus, base))?;
        map_in_kvm(&memory.copied, &memory.ram, &vcpus[0]);
        if restore.hold && !is_paged(restore) {
            map_in_kvm(&restore.map_ahead, &memory.ram, &vcpus[0]);
        }
        let devices = events.step(names::DEVICES, || {
            let mut generation = restore
                .generation
                .as_ref()
                .map(restore::generation)
                .transpose()?;
            let state = restore::devices(&self.config, generation.as_mut(), state.devices)?;
            let devices = self.create_devices(base, &memory.ram, threads, Some(&state))?;
            if let Some(generation) = generation {
                devices.refresh_fw_cfg(GENERATION_NAME, generation);
            }
            Ok::<_, StartError>(devices)
        })?;
        state.chips.restore(&base.vm, &devices.board.pit)?;
        Ok((vcpus, devices))
    }

    /// Creates RAM. True if this kernel is in it already.
    fn create_memory(
        &self,
        base: &mut PreparedVm,
        kernel: &OpenFile,
    ) -> Result<(Arc<GuestRam>, bool), StartError> {
        let small = self.config.memory.pages == PageSize::Small;
        let mut ahead = base.ram.take().filter(|_| small);
        let preloaded = base.preloaded.take().filter(|_| ahead.is_some());
        let is_preloaded = preloaded.as_ref().is_some_and(|it| it.is(kernel));
        if let Some(another) = preloaded.filter(|_| !is_preloaded) {
            ahead = ahead.filter(|ahead| ahead.clear(another.range()).is_ok());
        }
        let ram = GuestRam::create_in(&self.config.memory, ahead.map(RamAhead::into_file))?;
        ram.register(&base.vm)?;
        Ok((Arc::new(ram), is_preloaded))
    }

    /// Maps a captured VM's memory, or has a pager serve it.
    fn attach_memory(&self, restore: &Restore, vm: &VmFd) -> Result<CapturedMemory, StartError> {
        let ram = restore::memory(restore, &self.config)?;
        let (mut supply, mut reported) = (Supply::NoPager, Vec::new());
        if let SavedMemory::Paged {
            socket,
            working_set,
        } = &restore.memory
        {
            let (memory, written) = PagedMemory::attach(&ram, socket, *working_set)?;
            supply = Supply::Building(PagerThread::start(memory)?);
            reported = written;
        }
        ram.register(vm)?;
        let (copied, first_writes) = if is_paged(restore) {
            // The guest reads many of these pages before it writes them, which would cost it a fault
            // each time.
            (reported, Vec::new())
        } else if restore.hold {
            // No run waits for this VM yet, so the pages are copied now.
            (restore.prefault.clone(), Vec::new())
        } else {
            (Vec::new(), restore.prefault.clone())
        };
        ram.copy_ahead(&copied);
        Ok(CapturedMemory {
            ram: Arc::new(ram),
            supply,
            copied,
            first_writes,
        })
    }

    fn create_devices(
        &self,
        base: &mut PreparedVm,
        ram: &Arc<GuestRam>,
        threads: &Threads,
        state: Option<&DevicesState>,
    ) -> Result<Devices, DeviceError> {
        let wires = std::mem::take(&mut base.wires);
        let args = DeviceArgs {
            config: &self.config,
            vm: &base.vm,
            ram,
            mailbox: &threads.mailbox,
            workers: &threads.for_devices,
            events: &self.events,
        };
        Devices::create(&args, wires, state)
    }

    fn load_kernel(
        &self,
        kernel: &OpenFile,
        is_preloaded: bool,
        ram: &GuestRam,
        devices: &Devices,
    ) -> Result<Entry, BootError> {
        let config = &self.config;
        let mut parameters = devices.parameters.clone();
        if config.record_activity {
            parameters = format!("{parameters} {}", calls::offer(ram.memory()));
        }
        let images = Images {
            kernel: &config.boot.kernel,
            initrd: config.boot.initrd.as_deref(),
            command_line: &config.boot.command_line,
            device_parameters: parameters.trim_start(),
            vcpus: config.vcpus,
        };
        boot::load(kernel, is_preloaded, &images, ram.memory(), ram.size())
    }

    fn assemble(self, base: PreparedVm, threads: Threads, built: Built) -> Vmm {
        Vmm::new(Parts {
            id: self.config.id,
            vm_stats: StatsFile::open(&*base.vm),
            hypervisor: base.hypervisor,
            vm: base.vm,
            ram: built.ram,
            vcpus: built.vcpus,
            devices: built.devices,
            mailbox: threads.mailbox,
            workers: threads.starter,
            gate: built.gate,
            supply: built.supply,
            first_entry: built.first_entry,
            unused: base.ram,
            noted_calls: built.noted_calls,
            events: self.events,
            sandbox: self.sandbox,
        })
    }
}

/// The results of the steps.
struct Built {
    ram: Arc<GuestRam>,
    vcpus: Vec<Vcpu>,
    devices: Devices,
    supply: Supply,
    gate: Gate,
    noted_calls: Option<NotedCalls>,
    first_entry: FirstEntry,
}

/// A captured VM's memory.
struct CapturedMemory {
    ram: Arc<GuestRam>,
    supply: Supply,
    /// Pages that are private to this VM already.
    copied: Vec<Extent>,
    /// Pages to copy as soon as the guest runs.
    first_writes: Vec<Extent>,
}

/// What starts a VM's threads, and the mailbox through which they reach the main thread.
struct Threads {
    mailbox: Arc<Mailbox>,
    starter: Arc<ThreadStarter>,
    for_devices: Arc<dyn Workers>,
}

impl Threads {
    fn start(
        prepared: Option<&mut PreparedVm>,
        config: &VmmConfig,
        sandbox: Sandbox,
    ) -> Result<Threads, StartError> {
        let mailbox = Arc::new(Mailbox::new().map_err(host("an event descriptor"))?);
        let idle = prepared.map(|prepared| std::mem::take(&mut prepared.threads));
        let idle = idle.unwrap_or_default().keep(&registry::workers(config));
        let starter = Arc::new(ThreadStarter::new(mailbox.clone(), sandbox, idle));
        Ok(Threads {
            mailbox,
            starter: starter.clone(),
            for_devices: starter,
        })
    }
}

fn is_paged(restore: &Restore) -> bool {
    matches!(restore.memory, SavedMemory::Paged { .. })
}

/// The parts that every VM needs: KVM's VM with its interrupt controllers, a vCPU, devices'
/// interrupts and doorbells, and threads.
#[derive(Debug)]
pub struct PreparedVm {
    hypervisor: Hypervisor,
    vm: Arc<VmFd>,
    /// The first vCPU, if it was created ahead. That needs a KVM that can set a time stamp counter
    /// which has run for a while.
    first_vcpu: Option<Vcpu>,
    /// What this host can give a guest, if that was read ahead.
    host_cpu: Option<HostCpu>,
    /// Event descriptors of the first devices, if they were created ahead.
    wires: Vec<Wires>,
    /// Threads that wait for work, if they were started ahead.
    threads: IdleThreads,
    /// The beginning of RAM, if it was made ahead; a restored VM has no use for it.
    ram: Option<RamAhead>,
    /// The kernel that most VMs boot, until it is loaded ahead.
    kernel: Option<OpenFile>,
    /// The kernel that is in `ram`.
    preloaded: Option<Preloaded>,
}

impl PreparedVm {
    /// Prepares the process and the parts of a VM whose configuration is not known yet; the VM will
    /// probably boot this kernel.
    ///
    /// # Errors
    ///
    /// The host's KVM lacks something, or a descriptor or thread can't be created.
    pub fn ahead(sandbox: Sandbox, kernel: Option<OpenFile>) -> Result<PreparedVm, StartError> {
        prepare_process(sandbox)?;
        let mut prepared = PreparedVm::new()?;
        prepared.host_cpu = Some(HostCpu::of(&prepared.hypervisor)?);
        if tsc::has_offset(&prepared.vm) {
            prepared.first_vcpu = Some(prepared.vcpu(0)?);
        }
        prepared.wires = wiring::ahead(&prepared.vm)?;
        prepared.threads = IdleThreads::usual(sandbox).map_err(host("a thread"))?;
        prepared.ram = Some(RamAhead::new()?);
        prepared.kernel = kernel;
        Ok(prepared)
    }

    /// Only KVM's VM.
    fn new() -> Result<PreparedVm, HypervisorError> {
        let hypervisor = Hypervisor::open()?;
        let vm = Arc::new(hypervisor.create_vm()?);
        Ok(PreparedVm {
            hypervisor,
            vm,
            first_vcpu: None,
            host_cpu: None,
            wires: Vec::new(),
            threads: IdleThreads::default(),
            ram: None,
            kernel: None,
            preloaded: None,
        })
    }

    /// Allocates one more part of RAM, and at last loads the kernel; false if there is nothing left
    /// to do ahead.
    pub fn prepare_next(&mut self) -> bool {
        if self.ram.as_mut().is_some_and(RamAhead::allocate_next) {
            return true;
        }
        let (Some(ram), Some(kernel)) = (&self.ram, self.kernel.take()) else {
            return false;
        };
        match Preloaded::load(&kernel, ram.memory(), RamAhead::KERNEL_END) {
            Ok(preloaded) => self.preloaded = preloaded,
            // A part of it may be there.
            Err(_) => self.ram = None,
        }
        false
    }

    /// The VM that was prepared ahead, or a new one.
    fn prepared_or_new(prepared: Option<PreparedVm>) -> Result<PreparedVm, HypervisorError> {
        prepared.map_or_else(PreparedVm::new, Ok)
    }

    /// What this host can give a guest.
    fn host_cpu(&mut self) -> Result<HostCpu, HypervisorError> {
        match self.host_cpu.take() {
            Some(host_cpu) => Ok(host_cpu),
            None => HostCpu::of(&self.hypervisor),
        }
    }

    /// The part of [`HostCpu`] that a guest without a profile needs.
    fn supported(&mut self) -> Result<(CpuId, Host), HypervisorError> {
        if let Some(host_cpu) = self.host_cpu.take() {
            return Ok((host_cpu.supported, host_cpu.host));
        }
        let host = Host::read(self.hypervisor.has_tsc_deadline());
        Ok((self.hypervisor.supported_cpuid()?, host))
    }

    /// Refuses a captured guest that can't continue on this host.
    fn check(&mut self, guest: &VcpuState) -> Result<(), StartError> {
        let vcpu = self.vcpu(0)?;
        self.host_cpu()?.check(&guest.processor(), vcpu.tsc_khz())?;
        self.first_vcpu = Some(vcpu);
        Ok(())
    }

    /// Creates vCPU `index`, or takes it if it was created ahead; call it once for each.
    fn vcpu(&mut self, index: u8) -> Result<Vcpu, HypervisorError> {
        match self.first_vcpu.take_if(|vcpu| vcpu.index() == index) {
            Some(vcpu) => Ok(vcpu),
            None => Vcpu::create(&self.vm, index),
        }
    }
}

/// The error of a refused host call.
fn host(what: &'static str) -> impl FnOnce(io::Error) -> StartError {
    move |source| StartError::Host { what, source }
}

/// How many descriptors the kernel's table has room for from the start: all layers of a VM's RAM
/// twice, and those of its devices.
const DESCRIPTORS: u16 = 256;

/// Grows the descriptor table, installs signal handlers and prepares the sandbox. Must be called
/// while the process has one thread.
fn prepare_process(sandbox: Sandbox) -> Result<(), StartError> {
    fds::make_room(DESCRIPTORS);
    kick::install().map_err(host("a signal handler"))?;
    sandbox.prepare().map_err(host("a sandbox"))
}

/// Creates vCPUs from their saved state, vCPU 0 first: the others share its time stamp
/// counter.
fn restore_vcpus(
    states: &[VcpuState],
    base: &mut PreparedVm,
) -> Result<Vec<Vcpu>, HypervisorError> {
    let mut tsc = SharedOffset::default();
    (0..)
        .zip(states)
        .map(|(index, state)| {
            let vcpu = base.vcpu(index)?;
            vcpu.restore(state, &mut tsc)?;
            Ok(vcpu)
        })
        .collect()
}

/// Maps ranges in KVM's page tables.
fn map_in_kvm(extents: &[Extent], ram: &GuestRam, vcpu: &Vcpu) {
    for extent in extents {
        for (address, length) in ram.guest_parts(*extent) {
            vcpu.map_ahead(address, length);
        }
    }
}

fn create_vcpus(config: &VmmConfig, base: &mut PreparedVm) -> Result<Vec<Vcpu>, StartError> {
    let (mut cpuid, profile) = match &config.cpu_profile {
        None => {
            let (supported, host) = base.supported()?;
            (cpuid::for_vm(&supported, config.vcpus, host, None), None)
        }
        Some(wanted) => {
            let host_cpu = base.host_cpu()?;
            let profile = wanted.of(&host_cpu.shown()).map_err(ProfileError::Wanted)?;
            let cpuid = cpuid::for_vm(
                &host_cpu.supported,
                config.vcpus,
                host_cpu.host,
                Some(&profile),
            );
            (cpuid, Some(profile))
        }
    };
    (0..config.vcpus)
        .map(|index| {
            let vcpu = base.vcpu(index)?;
            vcpu.configure(&mut cpuid, config.vcpus, profile.as_ref())?;
            Ok(vcpu)
        })
        .collect()
}
