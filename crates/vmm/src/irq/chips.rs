//! PICs, IOAPIC, timer chip and clock of a VM: what a snapshot keeps of them.

use crate::hypervisor::{HypervisorError, failed_to};
use crate::irq::LazyPit;
use kvm_bindings::{
    KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, kvm_clock_data, kvm_irqchip,
    kvm_pit_state2,
};
use kvm_ioctls::VmFd;
use serde::{Deserialize, Serialize};

/// The VM-wide parts inside KVM.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ChipsState {
    /// First interrupt controller, PC style.
    pub pic_master: kvm_irqchip,
    /// Second interrupt controller, PC style.
    pub pic_slave: kvm_irqchip,
    /// The IOAPIC.
    pub ioapic: kvm_irqchip,
    /// The timer chip, if the guest ever used it.
    pub pit: Option<kvm_pit_state2>,
    /// kvm-clock, nanoseconds.
    pub clock_ns: u64,
}

impl ChipsState {
    /// Reads them; no vCPU runs.
    pub fn save(vm: &VmFd, pit: &LazyPit) -> Result<ChipsState, HypervisorError> {
        let chip = |chip_id| {
            let mut chip = kvm_irqchip {
                chip_id,
                ..Default::default()
            };
            vm.get_irqchip(&mut chip)
                .map_err(failed_to("read an interrupt controller"))?;
            Ok(chip)
        };
        Ok(ChipsState {
            pic_master: chip(KVM_IRQCHIP_PIC_MASTER)?,
            pic_slave: chip(KVM_IRQCHIP_PIC_SLAVE)?,
            ioapic: chip(KVM_IRQCHIP_IOAPIC)?,
            pit: pit.save()?,
            clock_ns: vm
                .get_clock()
                .map_err(failed_to("read the guest's clock"))?
                .clock,
        })
    }

    /// Writes them into a new VM.
    pub fn restore(&self, vm: &VmFd, pit: &LazyPit) -> Result<(), HypervisorError> {
        for (chip, chip_id) in [
            (&self.pic_master, KVM_IRQCHIP_PIC_MASTER),
            (&self.pic_slave, KVM_IRQCHIP_PIC_SLAVE),
            (&self.ioapic, KVM_IRQCHIP_IOAPIC),
        ] {
            let mut chip = *chip;
            chip.chip_id = chip_id;
            vm.set_irqchip(&chip)
                .map_err(failed_to("set an interrupt controller"))?;
        }
        if let Some(state) = &self.pit {
            pit.restore(state)?;
        }
        vm.set_clock(&kvm_clock_data {
            clock: self.clock_ns,
            ..Default::default()
        })
        .map_err(failed_to("set the guest's clock"))
    }
}
