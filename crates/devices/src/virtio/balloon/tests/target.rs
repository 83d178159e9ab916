//! Tests of the balloon's target.

use super::super::TargetError;
use super::*;

#[test]
fn the_driver_is_told_of_a_new_target() {
    let mut guest = Guest::new();
    assert_eq!(guest.config(), [0; 4]);
    guest.balloon().set_target(20).unwrap();
    assert_eq!(guest.config()[0], 20 * 256);
    assert_eq!(guest.device.interrupt.counts().config_changed, 1);
    assert!(!guest.balloon().is_full());
    guest
        .balloon()
        .write_config(4, &(20u32 * 256).to_le_bytes());
    assert!(guest.balloon().is_full());
    assert_eq!(guest.balloon().actual_mib(), 20);
    assert_eq!(guest.balloon().target_mib(), 20);
    // The driver may have had to take pages back, so the same target is announced again.
    guest.balloon().set_target(20).unwrap();
    assert_eq!(guest.device.interrupt.counts().config_changed, 2);
}

#[test]
fn no_target_is_larger_than_the_vm() {
    let mut guest = Guest::new();
    guest.balloon().set_target(32).unwrap();
    for target_mib in [33, 1 << 24, u32::MAX] {
        let ram_mib = 32;
        assert_eq!(
            guest.balloon().set_target(target_mib),
            Err(TargetError {
                target_mib,
                ram_mib
            })
        );
    }
    assert_eq!(guest.balloon().target_mib(), 32);
    assert_eq!(guest.device.interrupt.counts().config_changed, 1);
}

#[test]
fn a_target_set_during_a_pause_is_announced_on_resume() {
    let guest = Guest::new();
    let memory = guest.memory.clone();
    let (mut balloon, queues) = guest.stop();
    balloon.set_target(3).unwrap();
    assert!(balloon.save().untold);
    let device = Running::start(balloon, &memory, queues, ALL);
    assert_eq!(device.interrupt.counts().config_changed, 1);
    assert!(!device.device.save().untold);
    let (balloon, queues) = device.stop();
    let device = Running::start(balloon, &memory, queues, ALL);
    assert_eq!(device.interrupt.counts().config_changed, 0, "notified once");
}

#[test]
fn a_reset_clears_the_drivers_balloon_but_not_the_target() {
    let mut guest = Guest::new();
    guest.balloon().set_target(3).unwrap();
    guest.balloon().write_config(4, &[0xff; 4]);
    guest.balloon().write_config(12, &[0xff; 4]);
    let (mut balloon, _) = guest.stop();
    balloon.reset();
    assert_eq!((balloon.target_mib(), balloon.actual_mib()), (3, 0));
    assert_eq!(balloon.save().poison, 0);
}
