//! What a snapshot keeps of a VM's PICs, IOAPIC, timer chip and clock.

use crate::hypervisor::{HypervisorError, failed_to};
use crate::irq::LazyPit;
use crate::irq::pit::Channel;
use kvm_bindings::{
    KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, kvm_clock_data, kvm_irqchip,
    kvm_pit_state2,
};
use kvm_ioctls::VmFd;
use serde::{Deserialize, Serialize};

/// The state of KVM's devices that belong to the whole VM.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ChipsState {
    /// The first PIC.
    pub pic_master: kvm_irqchip,
    /// The second PIC.
    pub pic_slave: kvm_irqchip,
    /// The IOAPIC.
    pub ioapic: kvm_irqchip,
    /// The timer chip, if the guest has used it.
    pub pit: Option<kvm_pit_state2>,
    /// What the guest has programmed into a timer chip that it has not used yet.
    pub pit_programmed: [Channel; 3],
    /// kvm-clock, nanoseconds.
    pub clock_ns: u64,
}

impl ChipsState {
    /// Reads the state; no vCPU may run.
    ///
    /// # Errors
    ///
    /// If `KVM_GET_IRQCHIP`, `KVM_GET_PIT2` or `KVM_GET_CLOCK` fails.
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
            pit_programmed: pit.programmed(),
            clock_ns: vm
                .get_clock()
                .map_err(failed_to("read the guest's clock"))?
                .clock,
        })
    }

    /// Writes the state into a new VM.
    ///
    /// # Errors
    ///
    /// If `KVM_SET_IRQCHIP`, `KVM_CREATE_PIT2`, `KVM_SET_PIT2` or `KVM_SET_CLOCK` fails.
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
        match &self.pit {
            Some(state) => pit.restore(state)?,
            None => pit.program(self.pit_programmed),
        }
        vm.set_clock(&kvm_clock_data {
            clock: self.clock_ns,
            ..Default::default()
        })
        .map_err(failed_to("set the guest's clock"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hypervisor::Hypervisor;
    use std::sync::Arc;

    #[test]
    #[ignore = "needs a real KVM"]
    fn a_pit_that_does_not_exist_yet_keeps_its_control_word() {
        const COUNTER_0: u16 = 0x40;
        const CONTROL: u16 = 0x43;
        /// Counter 0, low byte then high byte, mode 2.
        const RATE: u8 = 0x34;
        let vm = || Arc::new(Hypervisor::open().unwrap().create_vm().unwrap());
        let (before, after) = (vm(), vm());
        let pit = LazyPit::new(before.clone());
        pit.write(CONTROL, RATE);
        let chips = ChipsState::save(&before, &pit).unwrap();
        assert!(chips.pit.is_none(), "no counter runs yet");
        let pit = LazyPit::new(after.clone());
        chips.restore(&after, &pit).unwrap();
        pit.write(COUNTER_0, 0x12);
        let chip = ChipsState::save(&after, &pit).unwrap().pit.unwrap();
        let counter = chip.channels[0];
        assert_eq!((counter.mode, counter.rw_mode), (2, 3));
        assert_eq!((counter.write_latch, counter.write_state), (0x12, 4));
    }
}
