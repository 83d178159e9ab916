//! The timer chip (Intel 8254) at ports 0x40 to 0x43 and 0x61. It is created in KVM when a guest
//! first starts a counter or reads one.
//!
//! Linux on kvm-clock with the TSC deadline timer does neither, and so needs no chip and no kernel
//! thread. NetBSD and others do.

use crate::hypervisor::{HypervisorError, failed_to};
use jiffy_sys::mutex::lock;
use kvm_bindings::{KVM_PIT_SPEAKER_DUMMY, kvm_pit_config, kvm_pit_state2};
use kvm_ioctls::VmFd;
use serde::{Deserialize, Serialize};
use std::sync::{Arc, Mutex};

const COUNTER_0: u16 = 0x40;
const COUNTER_2: u16 = 0x42;
const CONTROL: u16 = 0x43;
const SPEAKER: u16 = 0x61;

const SPEAKER_GATE: u8 = 1;
const LOW_THEN_HIGH: u8 = 3;

/// The chip, or what the guest has programmed before it is needed.
#[derive(Debug)]
pub struct LazyPit {
    vm: Arc<VmFd>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    made: bool,
    channels: [Channel; 3],
}

/// A counter that does not run yet.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Channel {
    /// Which bytes of a count are written: 1 low, 2 high, 3 both.
    access: u8,
    mode: u8,
    /// How many zero bytes of a count were written in mode 0.
    zeros: u8,
}

impl LazyPit {
    /// The chip is not created yet.
    pub fn new(vm: Arc<VmFd>) -> LazyPit {
        LazyPit {
            vm,
            state: Mutex::default(),
        }
    }

    /// Whether a port belongs to the chip. Once it is created, KVM handles its ports itself.
    pub fn has(port: u16) -> bool {
        matches!(port, COUNTER_0..=CONTROL | SPEAKER)
    }

    /// Handles the guest's read of a port.
    pub fn read(&self, _port: u16) -> u8 {
        // A counter that was just created has not counted yet.
        let mut state = lock(&self.state);
        self.make_for_guest(&mut state, |_| {});
        0
    }

    /// Handles the guest's write to a port.
    pub fn write(&self, port: u16, value: u8) {
        let mut state = lock(&self.state);
        match port {
            CONTROL => self.control(&mut state, value),
            COUNTER_0..=COUNTER_2 => {
                let index = usize::from(port - COUNTER_0);
                let channel = &mut state.channels[index];
                // Linux stops a counter by loading zero in mode 0.
                if value == 0 && channel.mode == 0 && channel.zeros < 2 {
                    channel.zeros += 1;
                    return;
                }
                let (access, zeros) = (channel.access, channel.zeros);
                self.make_for_guest(&mut state, |chip| {
                    let channel = &mut chip.channels[index];
                    if access == LOW_THEN_HIGH && zeros % 2 == 0 {
                        // The high byte is written next.
                        channel.write_latch = value;
                        channel.write_state = 4;
                    } else if access == 1 {
                        channel.count = value.into();
                    } else {
                        channel.count = u32::from(value) << 8;
                    }
                });
            }
            _ => self.make_for_guest(&mut state, |chip| {
                chip.channels[2].gate = value & SPEAKER_GATE;
            }),
        }
    }

    fn control(&self, state: &mut State, value: u8) {
        let access = value >> 4 & 3;
        match state.channels.get_mut(usize::from(value >> 6)) {
            Some(channel) if access != 0 && !state.made => {
                let mode = value >> 1 & 7;
                *channel = Channel {
                    access,
                    mode: if mode > 5 { mode & 3 } else { mode },
                    zeros: 0,
                };
            }
            // Latch or read-back: the guest is about to read.
            _ => self.make_for_guest(state, |_| {}),
        }
    }

    /// Creates the chip with the counters as programmed so far, changed by `change`. If that fails,
    /// the guest still has no timer chip.
    fn make_for_guest(&self, state: &mut State, change: impl FnOnce(&mut kvm_pit_state2)) {
        let made = self.make(state).and_then(|()| {
            let mut chip = self.vm.get_pit2().map_err(failed_to("read the timer"))?;
            for (channel, known) in chip.channels.iter_mut().zip(&mut state.channels) {
                if known.access != 0 {
                    channel.rw_mode = known.access;
                    channel.read_state = known.access;
                    channel.write_state = known.access;
                    channel.mode = known.mode;
                }
                *known = Channel::default();
            }
            change(&mut chip);
            self.vm.set_pit2(&chip).map_err(failed_to("set the timer"))
        });
        if let Err(error) = made {
            tracing::warn!(
                error = &error as &dyn std::error::Error,
                "the timer chip (PIT) could not be created; the guest has none"
            );
        }
    }

    fn make(&self, state: &mut State) -> Result<(), HypervisorError> {
        if !state.made {
            self.vm
                .create_pit2(kvm_pit_config {
                    flags: KVM_PIT_SPEAKER_DUMMY,
                    ..Default::default()
                })
                .map_err(failed_to("create a timer chip"))?;
            state.made = true;
        }
        Ok(())
    }

    /// What a guest has programmed into a chip that it has not used yet.
    pub(super) fn programmed(&self) -> [Channel; 3] {
        let state = lock(&self.state);
        state.channels
    }

    /// Restores what [`programmed`](LazyPit::programmed) returned.
    pub(super) fn program(&self, channels: [Channel; 3]) {
        let mut state = lock(&self.state);
        // The state is not trusted: only values that a control byte can have are accepted.
        let plausible = |channel: &Channel| channel.access <= 3 && channel.mode <= 5;
        if !state.made && channels.iter().all(plausible) {
            state.channels = channels;
        }
    }

    pub(super) fn save(&self) -> Result<Option<kvm_pit_state2>, HypervisorError> {
        let state = lock(&self.state);
        if !state.made {
            return Ok(None);
        }
        let chip = self.vm.get_pit2().map_err(failed_to("read the timer"))?;
        Ok(Some(chip))
    }

    pub(super) fn restore(&self, chip: &kvm_pit_state2) -> Result<(), HypervisorError> {
        let mut state = lock(&self.state);
        self.make(&mut state)?;
        self.vm.set_pit2(chip).map_err(failed_to("set the timer"))
    }
}
