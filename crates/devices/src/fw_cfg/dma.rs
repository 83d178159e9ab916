//! The DMA request: `{control: u32, length: u32, address: u64}`, big endian,
//! in guest memory.

use super::items::{Items, Position};
use crate::GuestMemory;
use vm_memory::{Address, Bytes, GuestAddress, GuestMemory as _, Permissions};

const ERROR: u32 = 1 << 0;
const READ: u32 = 1 << 1;
const SKIP: u32 = 1 << 2;
const SELECT: u32 = 1 << 3;
const WRITE: u32 = 1 << 4;

const REQUEST_BYTES: usize = 16;
const ZEROS: [u8; 4096] = [0; 4096];

/// Executes the request at `address` and writes the result to its control word. A request outside
/// guest memory can't be answered and is ignored.
pub(super) fn run(
    items: &Items,
    position: &mut Position,
    memory: &GuestMemory,
    address: GuestAddress,
) {
    if !memory.check_range(address, REQUEST_BYTES, Permissions::ReadWrite) {
        tracing::debug!(
            address = address.0,
            "fw_cfg DMA request outside guest memory"
        );
        return;
    }
    let mut request = [0; REQUEST_BYTES];
    if memory.read_slice(&mut request, address).is_err() {
        return;
    }
    let [control, length, high, low] = words(request);
    let target = GuestAddress(u64::from(high) << 32 | u64::from(low));
    let answer = match perform(items, position, memory, control, length, target) {
        Some(()) => 0,
        None => ERROR,
    };
    // The range was checked above.
    let _ = memory.write_slice(&u32::to_be_bytes(answer), address);
}

fn words(request: [u8; REQUEST_BYTES]) -> [u32; 4] {
    let mut words = [0; 4];
    for (word, bytes) in words.iter_mut().zip(request.as_chunks::<4>().0) {
        *word = u32::from_be_bytes(*bytes);
    }
    words
}

/// Executes a request; `None` if it is refused.
fn perform(
    items: &Items,
    position: &mut Position,
    memory: &GuestMemory,
    control: u32,
    length: u32,
    target: GuestAddress,
) -> Option<()> {
    if control & SELECT != 0 {
        *position = Position::at_start((control >> 16) as u16);
    }
    // If a guest sets several bits, read takes precedence over write, and write over skip.
    if control & READ != 0 {
        if length != 0 {
            read(items, position, memory, length, target)?;
        }
    } else if control & WRITE != 0 {
        return None;
    } else if control & SKIP == 0 {
        return Some(());
    }
    if control & (READ | SKIP) != 0 {
        position.skip(length);
    }
    Some(())
}

/// Copies `length` bytes of the item, and zeros past its end.
fn read(
    items: &Items,
    position: &Position,
    memory: &GuestMemory,
    length: u32,
    target: GuestAddress,
) -> Option<()> {
    let length = length as usize;
    if !memory.check_range(target, length, Permissions::Write) {
        return None;
    }
    let rest = position.rest(items);
    let count = rest.len().min(length);
    memory.write_slice(&rest[..count], target).ok()?;
    let mut done = count;
    while done < length {
        let chunk = ZEROS.len().min(length - done);
        let address = target.checked_add(done as u64)?;
        memory.write_slice(&ZEROS[..chunk], address).ok()?;
        done += chunk;
    }
    Some(())
}
