//! Executes the driver's commands (Virtio 1.3 §5.1.6.5).

use super::backend::Endpoint;
use super::config::Link;
use crate::GuestMemory;
use crate::virtio::queue::Chain;
use crate::virtio::queue::chain::Walk;
use crate::virtio::queue::ring::Ring;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use virtio_bindings::virtio_net::*;
use virtio_queue::QueueT;
use vm_memory::{Bytes, GuestAddress};

/// Class, command, and the data of the longest command.
const COMMAND_MAX: usize = 2 + 2;
const OK: u8 = VIRTIO_NET_OK as u8;
const ERROR: u8 = VIRTIO_NET_ERR as u8;

/// The control queue.
pub(super) struct Control {
    ring: Ring,
    features: u64,
    link: Arc<Link>,
}

/// A command, and the address of its answer.
struct Command {
    bytes: [u8; COMMAND_MAX],
    length: usize,
    answer: Option<GuestAddress>,
}

impl Control {
    pub(super) fn new(ring: Ring, features: u64, link: Arc<Link>) -> Control {
        Control {
            ring,
            features,
            link,
        }
    }

    pub(super) fn ring(&self) -> &Ring {
        &self.ring
    }

    pub(super) fn into_ring(self) -> Ring {
        self.ring
    }

    /// Executes waiting commands, at most a queue's worth. `endpoint` enables as many pairs as the
    /// driver asks for.
    pub(super) fn serve(&mut self, memory: &GuestMemory, endpoint: &Endpoint) {
        for _ in 0..=self.ring.active().queue.size() {
            let Some(chain) = self.ring.pop(memory) else {
                if self.ring.enable_notification(memory) {
                    continue;
                }
                break;
            };
            let head = chain.head();
            let command = read(memory, chain);
            let mut written = 0;
            if let Some(place) = command.answer {
                let answer = self.execute(&command.bytes[..command.length], endpoint);
                written = memory.write_obj(answer, place).is_ok().into();
            }
            self.ring.give_back(memory, head, written);
        }
        self.ring.notify(memory);
    }

    fn execute(&self, command: &[u8], endpoint: &Endpoint) -> u8 {
        let has = |feature: u32| self.features & (1 << feature) != 0;
        let [class, number, data @ ..] = command else {
            return ERROR;
        };
        match (u32::from(*class), u32::from(*number), data) {
            (VIRTIO_NET_CTRL_ANNOUNCE, VIRTIO_NET_CTRL_ANNOUNCE_ACK, _)
                if has(VIRTIO_NET_F_GUEST_ANNOUNCE) =>
            {
                self.link.set_announce(false);
                OK
            }
            (VIRTIO_NET_CTRL_MQ, VIRTIO_NET_CTRL_MQ_VQ_PAIRS_SET, [low, high])
                if has(VIRTIO_NET_F_MQ) =>
            {
                let pairs = u16::from_le_bytes([*low, *high]);
                if !(1..=self.link.pairs).contains(&pairs) || endpoint.enable_pairs(pairs).is_err()
                {
                    return ERROR;
                }
                self.link.used_pairs.store(pairs, Ordering::SeqCst);
                OK
            }
            _ => ERROR,
        }
    }
}

/// Reads a command. Data beyond the longest command is ignored.
fn read(memory: &GuestMemory, chain: Chain) -> Command {
    let mut command = Command {
        bytes: [0; COMMAND_MAX],
        length: 0,
        answer: None,
    };
    for descriptor in Walk::new(memory, chain) {
        if descriptor.is_writable() {
            // The first writable byte; all commands here have an answer of one byte.
            if descriptor.length > 0 && command.answer.is_none() {
                command.answer = Some(descriptor.address);
            }
            continue;
        }
        let room = &mut command.bytes[command.length..];
        let now = room.len().min(descriptor.length as usize);
        if memory
            .read_slice(&mut room[..now], descriptor.address)
            .is_err()
        {
            command.answer = None;
            break;
        }
        command.length += now;
    }
    command
}
