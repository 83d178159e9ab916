//! A balloon that withholds memory from a guest.

use super::super::{RestoreError, TargetError, WithholdingState};
use super::*;

const FIRST: u32 = (FREE / PAGE) as u32;
const PLENTY: u32 = 24;

/// A guest that may use 8 of its 32 MiB.
fn guest() -> Guest {
    let host = Arc::new(Host::default());
    let balloon = Balloon::withholding(args(&host), PLENTY).unwrap();
    Guest::driving(balloon, memory(RAM as usize), 0, host)
}

/// All pages of this many MiB from [`FREE`] on, in requests as Linux sends them.
fn send(guest: &mut Guest, queue: u16, mib: u32) {
    for block in 0..mib {
        let pages: Vec<u32> = (0..256).map(|page| FIRST + block * 256 + page).collect();
        guest.send(queue, &pages);
    }
}

#[test]
fn the_driver_can_t_take_memory_back_by_itself() {
    let mut guest = guest();
    assert_eq!(guest.balloon().features(), 0);
    assert_eq!(guest.config()[0], PLENTY * 256, "known before it is asked");
    let host = Arc::new(Host::default());
    let too_much = Balloon::withholding(args(&host), 33).err();
    let (target_mib, ram_mib) = (33, 32);
    assert_eq!(
        too_much,
        Some(TargetError {
            target_mib,
            ram_mib
        })
    );
}

#[test]
fn only_pages_that_were_released_count_as_given() {
    let mut guest = guest();
    // What the driver says does not count.
    guest.balloon().write_config(4, &(6000u32).to_le_bytes());
    assert_eq!(guest.balloon().given_mib(), 0);
    send(&mut guest, INFLATE, 4);
    assert_eq!(guest.balloon().given_mib(), 4);
    send(&mut guest, DEFLATE, 1);
    assert_eq!(guest.balloon().given_mib(), 3);
    guest.send(DEFLATE, &[FIRST + 512]);
    assert_eq!(guest.balloon().given_mib(), 2, "rounded down");
    // Pages that it has not got, or that are not RAM.
    guest.send(INFLATE, &[u32::MAX, 1 << 20]);
    guest.send(DEFLATE, &[u32::MAX, 1 << 20]);
    assert_eq!(guest.balloon().save_withholding().given_pages, 767);
    for _ in 0..5 {
        send(&mut guest, DEFLATE, 1);
    }
    assert_eq!(guest.balloon().given_mib(), 0);
    for _ in 0..5 {
        send(&mut guest, INFLATE, 16);
    }
    assert_eq!(guest.balloon().given_mib(), 32, "at most all of RAM");
    let (mut balloon, _) = guest.stop();
    balloon.reset();
    assert_eq!(balloon.given_mib(), 0, "its driver is gone");
}

#[test]
fn pages_that_the_host_failed_to_release_are_not_given() {
    let host = Arc::new(Host {
        broken: true,
        ..Host::default()
    });
    let balloon = Balloon::withholding(args(&host), PLENTY).unwrap();
    let mut guest = Guest::driving(balloon, memory(RAM as usize), 0, host);
    send(&mut guest, INFLATE, 4);
    assert_eq!(guest.balloon().given_mib(), 0);
}

#[test]
fn a_restored_balloon_has_its_pages() {
    let mut guest = guest();
    send(&mut guest, INFLATE, 3);
    let state = guest.balloon().save_withholding();
    assert_eq!((state.balloon.target_pages, state.given_pages), (6144, 768));
    let restored = Balloon::restore_withholding(args(&guest.host), &state).unwrap();
    assert_eq!(restored.save_withholding(), state);
    assert_eq!(restored.features(), 0);
    assert_eq!((restored.ram_mib(), restored.given_mib()), (32, 3));
    let refused = |state| Balloon::restore_withholding(args(&guest.host), &state).err();
    let (given, ram) = (8193, 8192);
    let more = WithholdingState {
        given_pages: given,
        ..state
    };
    assert_eq!(refused(more), Some(RestoreError::Given { given, ram }));
}
