//! A VM, step by step.

use crate::boot::{self, Images};
use crate::cpu::cpuid::{self, Host};
use crate::cpu::profile::{Most, ProfileError};
use crate::cpu::tsc;
use crate::cpu::tsc::SharedOffset;
use crate::devices::{DeviceArgs, Devices, registry, wiring};
use crate::error::StartError;
use crate::events::Events;
use crate::gate::Gate;
use crate::hypervisor::{Hypervisor, HypervisorError};
use crate::mailbox::Mailbox;
use crate::memory::GuestRam;
use crate::pager::{Attendant, PagedMemory};
use crate::restore;
use crate::sandbox::Sandbox;
use crate::stats::StatsFile;
use crate::vcpu::{MAX_VCPUS, Vcpu, VcpuState};
use crate::vmm::{Parts, Vmm};
use crate::workers::{Crew, ThreadStarter};
use jiffy_devices::virtio::device::Workers;
use jiffy_devices::virtio::mmio::Wires;
use jiffy_sys::{fds, kick};
use jiffy_wire::guest::GENERATION_NAME;
use jiffy_wire::timeline::names;
use jiffy_wire::vmm::{Extent, Restore, SavedMemory, VmmConfig};
use kvm_bindings::CpuId;
use kvm_ioctls::VmFd;
use std::io;
use std::sync::Arc;

/// Builds a [`Vmm`] from a configuration.
pub struct Builder {
    config: VmmConfig,
    events: Arc<Events>,
    sandbox: Sandbox,
    groundwork: Option<Groundwork>,
}

impl Builder {
    /// A builder for this VM. Spans of its steps go to `events`.
    pub fn new(config: VmmConfig, events: Arc<Events>) -> Builder {
        Builder {
            config,
            events,
            sandbox: Sandbox::On,
            groundwork: None,
        }
    }

    /// What was done for it ahead.
    pub fn groundwork(mut self, groundwork: Option<Groundwork>) -> Builder {
        self.groundwork = groundwork;
        self
    }

    /// Whether the VM's threads are confined; they are unless told otherwise.
    pub fn sandbox(mut self, sandbox: Sandbox) -> Builder {
        self.sandbox = sandbox;
        self
    }

    /// Builds the VM, ready to boot its kernel, or to go on where it was
    /// captured. Nothing runs yet.
    pub fn build(mut self) -> Result<Vmm, StartError> {
        if let Some(restore) = self.config.restore.take() {
            return self.restore(&restore);
        }
        let common = self.common()?;
        let groundwork = self.groundwork.take();
        let (config, events) = (&self.config, &self.events);

        let mut ground = events.step(names::KVM_VM_CREATED, || lay(groundwork))?;
        ground.hypervisor.check_vcpus(config.vcpus)?;
        let vm = ground.vm.clone();
        let ram = events.step(names::MEMORY, || {
            let ram = GuestRam::create(&config.memory)?;
            ram.register(&vm)?;
            Ok::<_, StartError>(Arc::new(ram))
        })?;
        let vcpus = events.step(names::VCPUS, || create_vcpus(config, &mut ground))?;
        let devices = events.step(names::DEVICES, || {
            let wires = std::mem::take(&mut ground.wires);
            Devices::create(&self.device_args(&vm, &ram, &common), wires, None)
        })?;
        let entry = events.step(names::KERNEL_LOADED, || {
            let images = Images {
                kernel: &config.boot.kernel,
                initrd: config.boot.initrd.as_deref(),
                command_line: &config.boot.command_line,
                device_parameters: &devices.parameters,
                vcpus: config.vcpus,
            };
            boot::load(&images, ram.memory(), ram.size())
        })?;
        vcpus[0].enter_at(&entry)?;
        Ok(self.assemble(ground, ram, vcpus, devices, common))
    }

    /// Builds a VM as it was captured.
    fn restore(mut self, restore: &Restore) -> Result<Vmm, StartError> {
        let mut common = self.common()?;
        common.gate = Gate::of(restore);
        common.first_run = names::VCPUS_RESUMED;
        match self.restore_parts(restore, &mut common) {
            Ok((ground, ram, vcpus, devices)) => {
                Ok(self.assemble(ground, ram, vcpus, devices, common))
            }
            Err(error) => {
                // If memory was lost, this is why the rest went wrong.
                common.attendant.map(Attendant::end).transpose()?;
                Err(error)
            }
        }
    }

    /// What it is made of.
    fn restore_parts(
        &mut self,
        restore: &Restore,
        common: &mut Common,
    ) -> Result<Restored, StartError> {
        let groundwork = self.groundwork.take();
        let (config, events) = (&self.config, &self.events);
        let paged = matches!(restore.memory, SavedMemory::Paged { .. });
        let state = events.step(names::STATE_LOADED, || restore::state(restore, config))?;

        let mut ground = events.step(names::KVM_VM_CREATED, || {
            let mut ground = lay(groundwork)?;
            ground.check(&state.vcpus[0])?;
            Ok::<_, StartError>(ground)
        })?;
        ground.hypervisor.check_vcpus(config.vcpus)?;
        let vm = ground.vm.clone();
        let ram = events.step(names::MEMORY_ATTACHED, || {
            let ram = restore::memory(restore, config)?;
            if let SavedMemory::Paged {
                socket,
                working_set,
            } = &restore.memory
            {
                let (memory, written_soon) = PagedMemory::attach(&ram, socket, *working_set)?;
                common.attendant = Some(Attendant::start(memory)?);
                common.written_soon = written_soon;
            }
            ram.register(&vm)?;
            if paged {
                // The pager knows what comes first.
            } else if restore.hold {
                // Nobody waits for this VM yet.
                ram.copy_ahead(&restore.prefault);
            } else {
                common.written_soon = restore.prefault.clone();
            }
            Ok::<_, StartError>(Arc::new(ram))
        })?;
        let vcpus = events.step(names::VCPUS, || {
            let mut tsc = SharedOffset::default();
            (0..)
                .zip(&state.vcpus)
                .map(|(index, state)| {
                    let vcpu = ground.vcpu(index)?;
                    vcpu.restore(state, &mut tsc)?;
                    Ok(vcpu)
                })
                .collect::<Result<Vec<_>, HypervisorError>>()
        })?;
        if restore.hold && !paged {
            for extent in &restore.prefault {
                for (address, length) in ram.guest_parts(*extent) {
                    vcpus[0].map_ahead(address, length);
                }
            }
        }
        let devices = events.step(names::DEVICES, || {
            let mut generation = restore
                .generation
                .as_ref()
                .map(restore::generation)
                .transpose()?;
            let state = restore::devices(config, generation.as_mut(), state.devices)?;
            let args = self.device_args(&vm, &ram, common);
            let wires = std::mem::take(&mut ground.wires);
            let devices = Devices::create(&args, wires, Some(&state))?;
            if let Some(generation) = generation {
                devices.refresh_fw_cfg(GENERATION_NAME, generation);
            }
            Ok::<_, StartError>(devices)
        })?;
        state.chips.restore(&vm, &devices.board.pit)?;
        Ok((ground, ram, vcpus, devices))
    }

    fn common(&mut self) -> Result<Common, StartError> {
        if !(1..=MAX_VCPUS).contains(&self.config.vcpus) {
            return Err(StartError::Vcpus(self.config.vcpus));
        }
        if self.groundwork.is_none() {
            prepare_process(self.sandbox)?;
        }
        let mailbox = Arc::new(Mailbox::new().map_err(host("an event descriptor"))?);
        let ahead = self.groundwork.as_mut();
        let crew = ahead.map(|ground| std::mem::take(&mut ground.crew));
        let crew = crew
            .unwrap_or_default()
            .of_use(&registry::workers(&self.config));
        let workers = Arc::new(ThreadStarter::new(mailbox.clone(), self.sandbox, crew));
        Ok(Common {
            gate: Gate::default(),
            attendant: None,
            written_soon: Vec::new(),
            first_run: names::FIRST_KVM_RUN,
            mailbox,
            workers: workers.clone(),
            for_devices: workers,
        })
    }

    fn device_args<'a>(
        &'a self,
        vm: &'a Arc<VmFd>,
        ram: &'a Arc<GuestRam>,
        common: &'a Common,
    ) -> DeviceArgs<'a> {
        DeviceArgs {
            config: &self.config,
            vm,
            ram,
            mailbox: &common.mailbox,
            workers: &common.for_devices,
            events: &self.events,
        }
    }

    fn assemble(
        self,
        ground: Groundwork,
        ram: Arc<GuestRam>,
        vcpus: Vec<Vcpu>,
        devices: Devices,
        common: Common,
    ) -> Vmm {
        Vmm::new(Parts {
            id: self.config.id,
            vm_stats: StatsFile::open(&*ground.vm),
            hypervisor: ground.hypervisor,
            vm: ground.vm,
            ram,
            vcpus,
            devices,
            mailbox: common.mailbox,
            workers: common.workers,
            gate: common.gate,
            attendant: common.attendant,
            written_soon: common.written_soon,
            first_run: common.first_run,
            events: self.events,
            sandbox: self.sandbox,
        })
    }
}

/// The parts of a VM as they were captured.
type Restored = (Groundwork, Arc<GuestRam>, Vec<Vcpu>, Devices);

struct Common {
    gate: Gate,
    /// From the moment a pager has the memory.
    attendant: Option<Attendant>,
    /// What is to be copied as soon as the guest runs.
    written_soon: Vec<Extent>,
    /// What the first entry into the guest is called on the timeline.
    first_run: &'static str,
    mailbox: Arc<Mailbox>,
    workers: Arc<ThreadStarter>,
    for_devices: Arc<dyn Workers>,
}

/// What every VM has, whatever it is: KVM's VM with its interrupt controllers,
/// a vCPU, devices' wires, and threads.
#[derive(Debug)]
pub struct Groundwork {
    hypervisor: Hypervisor,
    vm: Arc<VmFd>,
    /// If it was done ahead, by a KVM that lets a time stamp counter be set which
    /// has counted for a while.
    first_vcpu: Option<Vcpu>,
    /// What this host can give a guest, if it was asked for ahead.
    most: Option<Most>,
    /// Of its first devices, if it was done ahead.
    wires: Vec<Wires>,
    /// Threads that wait for work, if it was done ahead.
    crew: Crew,
}

impl Groundwork {
    /// Does it ahead, before it is known for which VM, and prepares the process.
    pub fn ahead(sandbox: Sandbox) -> Result<Groundwork, StartError> {
        prepare_process(sandbox)?;
        let mut ground = lay(None)?;
        ground.most = Some(Most::of(&ground.hypervisor)?);
        if tsc::has_offset(&ground.vm) {
            ground.first_vcpu = Some(ground.vcpu(0)?);
        }
        ground.wires = wiring::ahead(&ground.vm)?;
        ground.crew = Crew::usual(sandbox).map_err(host("a thread"))?;
        Ok(ground)
    }

    /// What this host can give a guest.
    fn most(&mut self) -> Result<Most, HypervisorError> {
        match self.most.take() {
            Some(most) => Ok(most),
            None => Most::of(&self.hypervisor),
        }
    }

    /// What of that is needed of a guest that gets all of it.
    fn supported(&mut self) -> Result<(CpuId, Host), HypervisorError> {
        if let Some(most) = self.most.take() {
            return Ok((most.supported, most.host));
        }
        let host = Host::read(self.hypervisor.has_tsc_deadline());
        Ok((self.hypervisor.supported_cpuid()?, host))
    }

    /// Refuses a captured guest that can't go on here.
    fn check(&mut self, guest: &VcpuState) -> Result<(), StartError> {
        let vcpu = self.vcpu(0)?;
        self.most()?.check(&guest.processor(), vcpu.tsc_khz())?;
        self.first_vcpu = Some(vcpu);
        Ok(())
    }

    /// The vCPU of that number, which nobody has had yet.
    fn vcpu(&mut self, index: u8) -> Result<Vcpu, HypervisorError> {
        match self.first_vcpu.take_if(|vcpu| vcpu.index() == index) {
            Some(vcpu) => Ok(vcpu),
            None => Vcpu::create(&self.vm, index),
        }
    }
}

/// The host refused this.
fn host(what: &'static str) -> impl FnOnce(io::Error) -> StartError {
    move |source| StartError::Host { what, source }
}

/// Descriptors that a VM may have at a time without its table growing: all
/// layers of its RAM twice, and those of its devices.
const DESCRIPTORS: u16 = 256;

/// Room for descriptors, signal handlers and the sandbox's ground. There are no
/// other threads yet.
fn prepare_process(sandbox: Sandbox) -> Result<(), StartError> {
    fds::make_room(DESCRIPTORS);
    kick::install().map_err(host("a signal handler"))?;
    sandbox.prepare().map_err(host("a sandbox"))
}

/// That which was done ahead, or does it now.
fn lay(groundwork: Option<Groundwork>) -> Result<Groundwork, HypervisorError> {
    if let Some(groundwork) = groundwork {
        return Ok(groundwork);
    }
    let hypervisor = Hypervisor::open()?;
    let vm = Arc::new(hypervisor.create_vm()?);
    Ok(Groundwork {
        hypervisor,
        vm,
        first_vcpu: None,
        most: None,
        wires: Vec::new(),
        crew: Crew::default(),
    })
}

fn create_vcpus(config: &VmmConfig, ground: &mut Groundwork) -> Result<Vec<Vcpu>, StartError> {
    let (mut cpuid, profile) = match &config.cpu_profile {
        None => {
            let (supported, host) = ground.supported()?;
            (cpuid::for_vm(&supported, config.vcpus, host, None), None)
        }
        Some(wanted) => {
            let most = ground.most()?;
            let profile = wanted.of(&most.shown()).map_err(ProfileError::Wanted)?;
            let cpuid = cpuid::for_vm(&most.supported, config.vcpus, most.host, Some(&profile));
            (cpuid, Some(profile))
        }
    };
    (0..config.vcpus)
        .map(|index| {
            let vcpu = ground.vcpu(index)?;
            vcpu.configure(&mut cpuid, config.vcpus, profile.as_ref())?;
            Ok(vcpu)
        })
        .collect()
}
