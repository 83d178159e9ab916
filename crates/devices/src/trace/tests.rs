use super::*;
use std::sync::{Arc, Mutex};

fn port(limit: u64) -> (TracePort, Arc<Mutex<Vec<u8>>>) {
    let marks = Arc::new(Mutex::new(Vec::new()));
    let sink = marks.clone();
    let port = TracePort::new(limit, Box::new(move |mark| sink.lock().unwrap().push(mark)));
    (port, marks)
}

#[test]
fn each_byte_is_one_mark_in_order() {
    let (mut port, marks) = port(100);
    port.write(0, &[0x10]);
    port.write(0, &[0x11, 0x12]);
    port.write(0, &[]);
    assert_eq!(*marks.lock().unwrap(), [0x10, 0x11, 0x12]);
    assert_eq!(port.dropped(), 0);
}

#[test]
fn marks_above_the_limit_are_only_counted() {
    let (mut port, marks) = port(3);
    for mark in 0..=255 {
        port.write(0, &[mark]);
    }
    assert_eq!(*marks.lock().unwrap(), [0, 1, 2]);
    assert_eq!(port.dropped(), 253);
}

#[test]
fn reads_return_all_ones() {
    let (mut port, _) = port(1);
    let mut data = [0; 2];
    port.read(0, &mut data);
    assert_eq!(data, [0xff; 2]);
}

#[test]
fn a_restored_port_has_its_whole_limit_of_marks_again() {
    let (mut port, _) = port(3);
    port.write(0, &[1; 5]);
    let state = port.save();
    let marks = Arc::new(Mutex::new(Vec::new()));
    let sink = marks.clone();
    let mut restored = TracePort::restore(
        100,
        Box::new(move |mark| sink.lock().unwrap().push(mark)),
        &state,
    );
    restored.write(0, &[1, 2]);
    restored.write(0, &[3, 4]);
    assert_eq!(*marks.lock().unwrap(), [1, 2, 3]);
    assert_eq!(restored.dropped(), 1);
}

#[test]
fn a_restored_state_cannot_raise_the_limit() {
    let state = TraceState {
        limit: u64::MAX,
        written: 0,
    };
    let marks = Arc::new(Mutex::new(Vec::new()));
    let sink = marks.clone();
    let mut restored = TracePort::restore(
        3,
        Box::new(move |mark| sink.lock().unwrap().push(mark)),
        &state,
    );
    restored.write(0, &[1; 100]);
    assert_eq!(marks.lock().unwrap().len(), 3);
    assert_eq!(restored.save().limit, 3);
}
