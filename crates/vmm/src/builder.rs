//! Builds a VM step by step.

use crate::boot::{self, BootError, Entry, Images, OpenFile, calls};
use crate::cpu::cpuid::{self, Host};
use crate::cpu::profile::{HostCpu, ProfileError};
use crate::cpu::tsc::SharedOffset;
use crate::devices::{DeviceArgs, DeviceError, Devices, DevicesState, registry};
use crate::error::StartError;
use crate::events::Events;
use crate::gate::Gate;
use crate::hypervisor::HypervisorError;
use crate::mailbox::Mailbox;
use crate::memory::{GuestRam, RamAhead};
use crate::pager::{PagedMemory, PagerThread, Supply};
use crate::prepared::{
    Ahead, Base, BootRam, PreparedBoot, PreparedRestore, PreparedVm, host, prepare_process,
};
use crate::restore;
use crate::sandbox::Sandbox;
use crate::stats::StatsFile;
use crate::vcpu::{MAX_VCPUS, Vcpu, VcpuState};
use crate::vmm::{FirstEntry, NotedCalls, Parts, Vmm};
use crate::workers::{IdleThreads, ThreadStarter};
use jiffy_devices::virtio::device::Workers;
use jiffy_devices::virtio::mmio::Wires;
use jiffy_sys::activity;
use jiffy_wire::guest::GENERATION_NAME;
use jiffy_wire::timeline::names;
use jiffy_wire::vmm::{Extent, PageSize, Restore, SavedMemory, VmmConfig};
use kvm_ioctls::VmFd;
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
    /// If the host or the files that the configuration names can't provide what it asks for.
    pub fn build(mut self) -> Result<Vmm, StartError> {
        if !(1..=MAX_VCPUS).contains(&self.config.vcpus) {
            return Err(StartError::Vcpus(self.config.vcpus));
        }
        if self.config.record_activity {
            activity::record();
        }
        let (idle, ahead) = match self.prepared.take() {
            Some(prepared) => {
                let (idle, ahead) = prepared.into_parts();
                (idle, Some(ahead))
            }
            None => {
                prepare_process(self.sandbox)?;
                (IdleThreads::default(), None)
            }
        };
        let threads = Threads::start(idle, &self.config, self.sandbox)?;
        match self.config.restore.take() {
            None => self.boot(ahead, threads),
            Some(restore) => self.restore(&restore, ahead, threads),
        }
    }

    /// Builds a VM that boots.
    fn boot(self, ahead: Option<Ahead>, threads: Threads) -> Result<Vmm, StartError> {
        let (config, events) = (&self.config, &self.events);
        let PreparedBoot {
            base,
            first_vcpu,
            host_cpu,
            wires,
            ram,
        } = events.step(names::KVM_VM_CREATED, || PreparedBoot::of(ahead))?;
        base.hypervisor.check_vcpus(config.vcpus)?;
        let kernel = boot::open(&config.boot.kernel)?;
        let (ram, is_preloaded) =
            events.step(names::MEMORY, || self.create_memory(&base, ram, &kernel))?;
        let vcpus = events.step(names::VCPUS, || {
            create_vcpus(config, &base, host_cpu, first_vcpu)
        })?;
        let devices = events.step(names::DEVICES, || {
            self.create_devices(&base, wires, &ram, &threads, None)
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
                unused: None,
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
        ahead: Option<Ahead>,
        threads: Threads,
    ) -> Result<Vmm, StartError> {
        let (config, events) = (&self.config, &self.events);
        let state = events.step(names::STATE_LOADED, || restore::state(restore, config))?;
        let PreparedRestore {
            base,
            first_vcpu,
            wires,
            unused,
        } = events.step(names::KVM_VM_CREATED, || {
            PreparedRestore::of(ahead, &state.vcpus[0])
        })?;
        base.hypervisor.check_vcpus(config.vcpus)?;
        let mut memory = events.step(names::MEMORY_ATTACHED, || {
            self.attach_memory(restore, &base.vm)
        })?;
        // These steps may touch memory that the pager still has to fill.
        let rest = self
            .restore_vcpus(restore, &state.vcpus, base.vcpus(Some(first_vcpu)), &memory)
            .and_then(|vcpus| {
                let saved = state.devices;
                let devices =
                    self.restore_devices(restore, saved, &base, wires, &memory, &threads)?;
                state.chips.restore(&base.vm, &devices.board.pit)?;
                Ok((vcpus, devices))
            });
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
                unused,
                noted_calls: None,
                first_entry: FirstEntry {
                    moment: names::VCPUS_RESUMED,
                    first_writes: memory.first_writes,
                },
            },
        ))
    }

    /// Restores the vCPUs, and maps what the guest will read in KVM's page tables.
    fn restore_vcpus(
        &self,
        restore: &Restore,
        states: &[VcpuState],
        vcpus: impl Iterator<Item = Result<Vcpu, HypervisorError>>,
        memory: &CapturedMemory,
    ) -> Result<Vec<Vcpu>, StartError> {
        let events = &self.events;
        let vcpus = events.step(names::VCPUS, || restore_vcpus(states, vcpus))?;
        map_in_kvm(&memory.copied, &memory.ram, &vcpus[0]);
        if restore.hold && !is_paged(restore) {
            map_in_kvm(&restore.map_ahead, &memory.ram, &vcpus[0]);
        }
        Ok(vcpus)
    }

    fn restore_devices(
        &self,
        restore: &Restore,
        saved: DevicesState,
        base: &Base,
        wires: Vec<Wires>,
        memory: &CapturedMemory,
        threads: &Threads,
    ) -> Result<Devices, StartError> {
        self.events.step(names::DEVICES, || {
            let mut generation = restore
                .generation
                .as_ref()
                .map(restore::generation)
                .transpose()?;
            let state = restore::devices(&self.config, generation.as_mut(), saved)?;
            let devices = self.create_devices(base, wires, &memory.ram, threads, Some(&state))?;
            if let Some(generation) = generation {
                devices.refresh_fw_cfg(GENERATION_NAME, generation);
            }
            Ok(devices)
        })
    }

    /// Creates RAM. True if this kernel is in it already.
    fn create_memory(
        &self,
        base: &Base,
        ahead: Option<BootRam>,
        kernel: &OpenFile,
    ) -> Result<(Arc<GuestRam>, bool), StartError> {
        let small = self.config.memory.pages == PageSize::Small;
        let ahead = ahead.filter(|_| small);
        let (ahead, is_preloaded) = match ahead.and_then(|ahead| ahead.for_kernel(kernel)) {
            Some((ram, is_preloaded)) => (Some(ram), is_preloaded),
            None => (None, false),
        };
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
        base: &Base,
        wires: Vec<Wires>,
        ram: &Arc<GuestRam>,
        threads: &Threads,
        state: Option<&DevicesState>,
    ) -> Result<Devices, DeviceError> {
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

    fn assemble(self, base: Base, threads: Threads, built: Built) -> Vmm {
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
            unused: built.unused,
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
    /// RAM that was made ahead, for which a restored VM has no use.
    unused: Option<RamAhead>,
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
        idle: IdleThreads,
        config: &VmmConfig,
        sandbox: Sandbox,
    ) -> Result<Threads, StartError> {
        let mailbox = Arc::new(Mailbox::new().map_err(host("an event descriptor"))?);
        let idle = idle.keep(&registry::workers(config));
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

/// Creates vCPUs from their saved state, vCPU 0 first: the others share its time stamp
/// counter.
fn restore_vcpus(
    states: &[VcpuState],
    vcpus: impl Iterator<Item = Result<Vcpu, HypervisorError>>,
) -> Result<Vec<Vcpu>, HypervisorError> {
    let mut tsc = SharedOffset::default();
    // The states come first: no vCPU is created after the last of them.
    states
        .iter()
        .zip(vcpus)
        .map(|(state, vcpu)| {
            let vcpu = vcpu?;
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

/// Creates the vCPUs of a guest that boots. What this host can give it was read ahead, or is read as far
/// as it is needed.
fn create_vcpus(
    config: &VmmConfig,
    base: &Base,
    host_cpu: Option<HostCpu>,
    first: Option<Vcpu>,
) -> Result<Vec<Vcpu>, StartError> {
    let hypervisor = &base.hypervisor;
    let (mut cpuid, profile) = match &config.cpu_profile {
        None => {
            let (supported, host) = match host_cpu {
                Some(host_cpu) => (host_cpu.supported, host_cpu.host),
                None => {
                    let host = Host::read(hypervisor.has_tsc_deadline());
                    (hypervisor.supported_cpuid()?, host)
                }
            };
            (cpuid::for_vm(&supported, config.vcpus, host, None), None)
        }
        Some(wanted) => {
            let host_cpu = host_cpu.map_or_else(|| HostCpu::of(hypervisor), Ok)?;
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
        .zip(base.vcpus(first))
        .map(|(_, vcpu)| {
            let vcpu = vcpu?;
            vcpu.configure(&mut cpuid, config.vcpus, profile.as_ref())?;
            Ok(vcpu)
        })
        .collect()
}
