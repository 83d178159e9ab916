use super::driver::*;
use crate::virtio::testing::{Buffer, INDIRECT, NEXT};

#[test]
fn chains_without_a_status_byte_are_returned_without_status() {
    let disk = Fixture::new(16);
    let mut guest = Guest::start(&disk.options());
    guest.write_header(OUT, 0);
    guest.driver.store(DATA, &[9; 512]);
    for buffers in [
        vec![Buffer::readable(HEADER, 16)],
        vec![Buffer::readable(HEADER, 16), Buffer::readable(DATA, 512)],
        vec![Buffer::readable(HEADER, 16), Buffer::writable(STATUS, 0)],
        vec![Buffer::readable(HEADER, 0)],
    ] {
        assert_eq!(guest.send(&buffers).length, 0, "{buffers:?}");
    }
    assert_eq!(disk.bytes(0, 512), [0; 512], "nothing was written");
    assert_eq!(guest.read(1, 512).0, OK, "the disk still works");
}

#[test]
fn malformed_chains_are_answered_with_errors() {
    let disk = Fixture::new(16);
    let mut guest = Guest::start(&disk.options());
    let status = Buffer::writable(STATUS, 1);
    let header = Buffer::readable(HEADER, 16);
    for buffers in [
        // No header, and one that is too short.
        vec![status],
        vec![Buffer::readable(HEADER, 15), status],
        // A buffer that the device reads follows one that it writes.
        vec![Buffer::writable(DATA, 512), header, status],
        vec![
            header,
            Buffer::writable(DATA, 512),
            Buffer::readable(DATA, 1),
            status,
        ],
        // Partly or wholly outside guest memory, or past the end of all addresses.
        vec![header, Buffer::writable(MEMORY_BYTES - 256, 512), status],
        vec![header, Buffer::writable(1 << 40, 512), status],
        vec![header, Buffer::writable(u64::MAX - 100, 512), status],
        vec![Buffer::readable(MEMORY_BYTES, 16), status],
    ] {
        guest.write_header(IN, 0);
        assert_eq!(guest.send(&buffers).length, 1, "{buffers:?}");
        assert_eq!(guest.status(), IO_ERROR, "{buffers:?}");
    }
    assert_eq!(guest.load(DATA, 512), [0; 512], "nothing was read");
}

#[test]
fn a_status_byte_outside_memory_is_not_written() {
    let disk = Fixture::new(16);
    let mut guest = Guest::start(&disk.options());
    guest.write_header(IN, 0);
    let header = Buffer::readable(HEADER, 16);
    for address in [MEMORY_BYTES, u64::MAX] {
        let used = guest.send(&[header, Buffer::writable(address, 1)]);
        assert_eq!(used.length, 0);
    }
}

#[test]
fn more_buffers_than_announced_are_refused() {
    let disk = Fixture::new(16);
    let mut guest = Guest::start(&disk.options());
    let most = guest.config(12, 4);
    for (count, status) in [(most, OK), (most + 1, IO_ERROR), (most * 4, IO_ERROR)] {
        guest.write_header(IN, 0);
        let length = |n| if n < 64 { 8 } else { 0 };
        let one = |n| Buffer::writable(DATA + n * 8, length(n).max(1));
        let mut data: Vec<Buffer> = (0..count).map(one).collect();
        // The total is a whole number of sectors.
        let total: u32 = data.iter().map(|buffer| buffer.length).sum();
        data[0].length += 1024 - total % 512;
        guest.driver.add_indirect(0xa000, &usual(&data));
        guest.device.ring(0);
        guest.driver.wait_used();
        assert_eq!(guest.status(), status, "{count} buffers");
    }
}

#[test]
fn a_looping_chain_ends() {
    let disk = Fixture::new(16);
    let mut guest = Guest::start(&disk.options());
    guest.write_header(IN, 0);
    let table = guest.driver.descriptors();
    guest
        .driver
        .write_descriptor(table, 0, Buffer::readable(HEADER, 16), NEXT, 1);
    guest
        .driver
        .write_descriptor(table, 1, Buffer::writable(DATA, 512), NEXT, 1);
    guest.driver.offer(0);
    guest.device.ring(0);
    assert_eq!(guest.driver.wait_used().length, 0);
    assert_eq!(guest.load(DATA, 512), [0; 512]);
}

#[test]
fn a_chain_that_leaves_its_descriptor_table_ends() {
    let disk = Fixture::new(16);
    let mut guest = Guest::start(&disk.options());
    guest.write_header(IN, 0);
    let table = guest.driver.descriptors();
    for next in [64, 0xffff] {
        guest
            .driver
            .write_descriptor(table, 0, Buffer::readable(HEADER, 16), NEXT, 1);
        guest
            .driver
            .write_descriptor(table, 1, Buffer::writable(DATA, 513), NEXT, next);
        guest.driver.offer(0);
        guest.device.ring(0);
        assert_eq!(guest.driver.wait_used().length, 0);
    }
}

#[test]
fn malformed_indirect_tables_are_survived() {
    let disk = Fixture::new(16);
    let mut guest = Guest::start(&disk.options());
    let inner = 0xa000;
    let pointer = Buffer::readable(inner, 32);
    for (what, buffer, flags) in [
        ("empty", Buffer::readable(inner, 0), INDIRECT),
        (
            "not a multiple of 16",
            Buffer::readable(inner, 31),
            INDIRECT,
        ),
        (
            "outside memory",
            Buffer::readable(MEMORY_BYTES - 8, 32),
            INDIRECT,
        ),
        (
            "past the end of all",
            Buffer::readable(u64::MAX - 7, 32),
            INDIRECT,
        ),
        ("huge", Buffer::readable(inner, !15), INDIRECT),
        ("a table in a table", pointer, INDIRECT),
    ] {
        guest
            .driver
            .write_descriptor(inner, 0, pointer, INDIRECT, 0);
        let table = guest.driver.descriptors();
        guest.driver.write_descriptor(table, 0, buffer, flags, 0);
        guest.driver.offer(0);
        guest.device.ring(0);
        assert_eq!(guest.driver.wait_used().length, 0, "{what}");
    }
}

#[test]
fn impossible_rings_need_a_reset_and_stop_cleanly() {
    for break_it in [
        |guest: &mut Guest| guest.driver.set_avail_index(65),
        |guest: &mut Guest| guest.driver.set_avail_index(0xffff),
        |guest: &mut Guest| guest.driver.offer(64),
        |guest: &mut Guest| guest.driver.offer(0xffff),
    ] {
        let disk = Fixture::new(16);
        let mut guest = Guest::start(&disk.options());
        break_it(&mut guest);
        guest.device.ring(0);
        let interrupt = guest.device.interrupt.clone();
        interrupt.wait(|counts| counts.needs_reset == 1);
        // It waits for a reset, however often it is notified.
        guest.device.ring(0);
        let (_, queues) = guest.device.stop();
        assert_eq!(queues.len(), 1);
        assert_eq!(interrupt.counts().needs_reset, 1);
    }
}
