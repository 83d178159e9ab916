//! What every VM needs, prepared before its configuration is known.
//!
//! ```text
//!  PreparedVm ──▶ IdleThreads, and Ahead ──▶ PreparedBoot: a boot takes all of it
//!                                       └──▶ PreparedRestore: its vCPU fits the captured guest
//! ```
//!
//! A VM that was not started ahead begins at `PreparedBoot` or `PreparedRestore`, with nothing but KVM's
//! VM. What is `None` there was not made ahead, and stays so: the step that needs it makes it.

use crate::boot::OpenFile;
use crate::boot::preloaded::Preloaded;
use crate::cpu::profile::HostCpu;
use crate::cpu::tsc;
use crate::devices::wiring;
use crate::error::StartError;
use crate::hypervisor::{Hypervisor, HypervisorError};
use crate::memory::RamAhead;
use crate::sandbox::Sandbox;
use crate::vcpu::{Vcpu, VcpuState};
use crate::workers::IdleThreads;
use jiffy_devices::virtio::mmio::Wires;
use jiffy_sys::{fds, kick};
use kvm_ioctls::VmFd;
use std::io;
use std::sync::Arc;

/// How many descriptors the kernel's table has room for from the start: all layers of a VM's RAM
/// twice, and those of its devices.
const DESCRIPTORS: u16 = 256;

/// A process with the parts of a VM whose configuration is not known yet: KVM's VM with its interrupt
/// controllers, a vCPU, devices' interrupts and doorbells, threads, and the beginning of RAM.
#[derive(Debug)]
pub struct PreparedVm {
    threads: IdleThreads,
    ahead: Ahead,
}

/// The parts of a [`PreparedVm`] besides its threads.
#[derive(Debug)]
pub(crate) struct Ahead {
    base: Base,
    /// The first vCPU; `None` if this KVM can't set a time stamp counter which has run for a while.
    first_vcpu: Option<Vcpu>,
    host_cpu: HostCpu,
    wires: Vec<Wires>,
    ram: RamStage,
}

/// KVM's VM with its interrupt controllers.
#[derive(Debug)]
pub(crate) struct Base {
    pub hypervisor: Hypervisor,
    pub vm: Arc<VmFd>,
}

/// What a VM that boots begins with.
pub(crate) struct PreparedBoot {
    pub base: Base,
    pub first_vcpu: Option<Vcpu>,
    /// What this host can give a guest.
    pub host_cpu: Option<HostCpu>,
    /// Event descriptors of the first devices.
    pub wires: Vec<Wires>,
    pub ram: Option<BootRam>,
}

/// What a VM that continues from a capture begins with.
pub(crate) struct PreparedRestore {
    pub base: Base,
    pub first_vcpu: Vcpu,
    /// Event descriptors of the first devices.
    pub wires: Vec<Wires>,
    /// RAM that was made ahead, for which this VM has no use.
    pub unused: Option<RamAhead>,
}

/// RAM that is made ahead, one step at a time.
#[derive(Debug)]
enum RamStage {
    /// Its first parts are allocated; then this kernel is loaded.
    Allocating(RamAhead, Option<OpenFile>),
    /// All is done.
    Done(BootRam),
    /// A part of a kernel may be in it: it can't be used.
    Spoilt,
}

/// The beginning of RAM.
#[derive(Debug)]
pub(crate) struct BootRam {
    ram: RamAhead,
    /// The kernel that is in it.
    kernel: Option<Preloaded>,
}

impl PreparedVm {
    /// Prepares the process and the parts of a VM whose configuration is not known yet; the VM will
    /// probably boot this kernel.
    ///
    /// # Errors
    ///
    /// If the host's KVM lacks something, or a descriptor or thread can't be created.
    pub fn ahead(sandbox: Sandbox, kernel: Option<OpenFile>) -> Result<PreparedVm, StartError> {
        prepare_process(sandbox)?;
        let base = Base::open()?;
        let host_cpu = HostCpu::of(&base.hypervisor)?;
        let first_vcpu = match tsc::has_offset(&base.vm) {
            true => Some(Vcpu::create(&base.vm, 0)?),
            false => None,
        };
        let wires = wiring::ahead(&base.vm)?;
        let threads = IdleThreads::usual(sandbox).map_err(host("a thread"))?;
        let ram = RamStage::Allocating(RamAhead::new()?, kernel);
        Ok(PreparedVm {
            threads,
            ahead: Ahead {
                base,
                first_vcpu,
                host_cpu,
                wires,
                ram,
            },
        })
    }

    /// Allocates one more part of RAM, and at last loads the kernel; false if there is nothing left
    /// to do ahead.
    pub fn prepare_next(&mut self) -> bool {
        self.ahead.ram.advance()
    }

    /// Its threads, and the rest.
    pub(crate) fn into_parts(self) -> (IdleThreads, Ahead) {
        (self.threads, self.ahead)
    }
}

impl Base {
    fn open() -> Result<Base, HypervisorError> {
        let hypervisor = Hypervisor::open()?;
        let vm = Arc::new(hypervisor.create_vm()?);
        Ok(Base { hypervisor, vm })
    }

    /// The VM's vCPUs in their order, each created when it is asked for; `first` was created ahead.
    pub fn vcpus(
        &self,
        first: Option<Vcpu>,
    ) -> impl Iterator<Item = Result<Vcpu, HypervisorError>> {
        let next = u8::from(first.is_some());
        let created = (next..).map(|index| Vcpu::create(&self.vm, index));
        first.into_iter().map(Ok).chain(created)
    }
}

impl PreparedBoot {
    /// What was prepared ahead, or a new VM.
    pub fn of(ahead: Option<Ahead>) -> Result<PreparedBoot, HypervisorError> {
        Ok(match ahead {
            Some(ahead) => PreparedBoot {
                base: ahead.base,
                first_vcpu: ahead.first_vcpu,
                host_cpu: Some(ahead.host_cpu),
                wires: ahead.wires,
                ram: ahead.ram.usable(),
            },
            None => PreparedBoot {
                base: Base::open()?,
                first_vcpu: None,
                host_cpu: None,
                wires: Vec::new(),
                ram: None,
            },
        })
    }
}

impl PreparedRestore {
    /// What was prepared ahead, or a new VM, for a captured guest with this first vCPU.
    ///
    /// # Errors
    ///
    /// If the guest can't continue on this host.
    pub fn of(ahead: Option<Ahead>, guest: &VcpuState) -> Result<PreparedRestore, StartError> {
        let boot = PreparedBoot::of(ahead)?;
        let first_vcpu = match boot.first_vcpu {
            Some(vcpu) => vcpu,
            None => Vcpu::create(&boot.base.vm, 0)?,
        };
        let mut host_cpu = match boot.host_cpu {
            Some(host_cpu) => host_cpu,
            None => HostCpu::of(&boot.base.hypervisor)?,
        };
        host_cpu.check(&guest.processor(), first_vcpu.tsc_khz())?;
        Ok(PreparedRestore {
            base: boot.base,
            first_vcpu,
            wires: boot.wires,
            unused: boot.ram.map(|boot| boot.ram),
        })
    }
}

impl RamStage {
    /// Takes the next step; false if that was the last.
    fn advance(&mut self) -> bool {
        let RamStage::Allocating(ram, _) = self else {
            return false;
        };
        if ram.allocate_next() {
            return true;
        }
        if let RamStage::Allocating(ram, kernel) = std::mem::replace(self, RamStage::Spoilt) {
            *self = RamStage::load(ram, kernel);
        }
        false
    }

    fn load(ram: RamAhead, kernel: Option<OpenFile>) -> RamStage {
        let loaded = match kernel {
            Some(kernel) => Preloaded::load(&kernel, ram.memory(), RamAhead::KERNEL_END),
            None => Ok(None),
        };
        match loaded {
            Ok(kernel) => RamStage::Done(BootRam { ram, kernel }),
            Err(_) => RamStage::Spoilt,
        }
    }

    /// What there is so far.
    fn usable(self) -> Option<BootRam> {
        match self {
            RamStage::Allocating(ram, _) => Some(BootRam { ram, kernel: None }),
            RamStage::Done(ram) => Some(ram),
            RamStage::Spoilt => None,
        }
    }
}

impl BootRam {
    /// RAM for a VM that boots this kernel, and whether that is in it already. `None` if another
    /// kernel can't be removed from it.
    pub fn for_kernel(self, kernel: &OpenFile) -> Option<(RamAhead, bool)> {
        match self.kernel {
            Some(loaded) if loaded.is(kernel) => Some((self.ram, true)),
            Some(another) if self.ram.clear(another.range()).is_err() => None,
            _ => Some((self.ram, false)),
        }
    }
}

/// Grows the descriptor table, installs signal handlers and prepares the sandbox. Must be called
/// while the process has one thread.
pub(crate) fn prepare_process(sandbox: Sandbox) -> Result<(), StartError> {
    fds::make_room(DESCRIPTORS);
    kick::install().map_err(host("a signal handler"))?;
    sandbox.prepare().map_err(host("a sandbox"))
}

/// The error of a refused host call.
pub(crate) fn host(what: &'static str) -> impl FnOnce(io::Error) -> StartError {
    move |source| StartError::Host { what, source }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::boot::tests::small_kernel;
    use std::fs::{self, File};
    use std::path::Path;
    use vm_memory::{Bytes as _, GuestAddress};

    fn open(path: &Path) -> OpenFile {
        OpenFile::of(File::open(path).unwrap()).unwrap()
    }

    fn done(kernel: Option<OpenFile>) -> RamStage {
        let mut stage = RamStage::Allocating(RamAhead::new().unwrap(), kernel);
        while stage.advance() {}
        assert!(!stage.advance(), "there is nothing left to do");
        stage
    }

    /// The second byte of the kernel that is in RAM; the first is zero.
    fn second_byte(ram: &RamAhead) -> u8 {
        let address = GuestAddress(0x20_0001);
        ram.memory().read_obj(address).unwrap()
    }

    #[test]
    fn a_boot_gets_ram_with_its_own_kernel_or_none() {
        let folder = tempfile::tempdir().unwrap();
        let [own, other] = ["own", "other"].map(|name| folder.path().join(name));
        for kernel in [&own, &other] {
            fs::write(kernel, small_kernel()).unwrap();
        }
        let boots = |stage: RamStage| {
            let (ram, is_there) = stage.usable().unwrap().for_kernel(&open(&own)).unwrap();
            (is_there, second_byte(&ram))
        };
        assert_eq!(boots(done(Some(open(&own)))), (true, 1));
        assert_eq!(boots(done(Some(open(&other)))), (false, 0));
        assert_eq!(boots(done(None)), (false, 0));
        // A start came before the last step.
        let ram = RamAhead::new().unwrap();
        assert_eq!(
            boots(RamStage::Allocating(ram, Some(open(&own)))),
            (false, 0)
        );
    }

    #[test]
    fn ram_with_a_part_of_a_kernel_is_not_used() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let bytes = small_kernel();
        fs::write(file.path(), &bytes).unwrap();
        let kernel = open(file.path());
        file.as_file().set_len(bytes.len() as u64 - 1000).unwrap();
        assert!(done(Some(kernel)).usable().is_none());
    }
}
