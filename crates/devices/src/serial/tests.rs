use super::*;
use proptest::prelude::*;
use std::sync::Mutex;
use vmm_sys_util::eventfd::EFD_NONBLOCK;

const DATA: u64 = 0;
const IER: u64 = 1;
const IIR: u64 = 2;
const LSR: u64 = 5;
const RECEIVED_INTERRUPT: u8 = 1;
const TRANSMITTED_INTERRUPT: u8 = 2;
const DATA_READY: u8 = 1;
const FIFO_BYTES: usize = 64;

#[derive(Clone, Default)]
struct Sink(Arc<Mutex<Vec<u8>>>);

impl Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

struct Refusing;

impl Write for Refusing {
    fn write(&mut self, _: &[u8]) -> io::Result<usize> {
        Err(io::ErrorKind::BrokenPipe.into())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn port() -> (Serial, EventFd, Sink) {
    let line = EventFd::new(EFD_NONBLOCK).unwrap();
    let sink = Sink::default();
    let serial = Serial::new(line.try_clone().unwrap(), Box::new(sink.clone())).unwrap();
    (serial, line, sink)
}

fn read(serial: &mut Serial, register: u64) -> u8 {
    let mut data = [0];
    serial.read(register, &mut data);
    data[0]
}

#[test]
fn guest_output_reaches_the_sink() {
    let (mut serial, _, sink) = port();
    serial.write(DATA, b"h");
    serial.write(DATA, b"ello");
    assert_eq!(*sink.0.lock().unwrap(), b"hello");
    assert_eq!(serial.lost(), 0);
}

#[test]
fn bytes_that_the_sink_refuses_are_counted_as_lost() {
    let line = EventFd::new(EFD_NONBLOCK).unwrap();
    let mut serial = Serial::new(line, Box::new(Refusing)).unwrap();
    serial.write(DATA, b"abc");
    assert_eq!(serial.lost(), 3);
}

#[test]
fn input_waits_while_the_buffer_is_full() {
    let (mut serial, line, _) = port();
    serial.write(IER, &[RECEIVED_INTERRUPT]);
    let text: Vec<u8> = (0..100).collect();
    assert_eq!(serial.input(&text), FIFO_BYTES);
    assert!(line.read().is_ok(), "the guest is told");
    assert_eq!(serial.input(&text[FIFO_BYTES..]), 0);
    assert!(serial.drained().read().is_err(), "not drained yet");

    let mut got = vec![0; FIFO_BYTES];
    serial.read(DATA, &mut got);
    assert!(serial.drained().read().is_ok());
    assert_eq!(serial.input(&text[FIFO_BYTES..]), text.len() - FIFO_BYTES);
    while read(&mut serial, LSR) & DATA_READY != 0 {
        got.push(read(&mut serial, DATA));
    }
    assert_eq!(got, text);
}

#[test]
fn empty_input_raises_no_interrupt() {
    let (mut serial, line, _) = port();
    serial.write(IER, &[RECEIVED_INTERRUPT]);
    assert_eq!(serial.input(&[]), 0);
    assert!(line.read().is_err());
}

#[test]
fn registers_and_unread_input_survive_a_restore() {
    let (mut serial, _, _) = port();
    serial.write(7, &[0x5a]);
    serial.write(IER, &[RECEIVED_INTERRUPT]);
    serial.input(b"ls\n");
    let state = serial.save();

    let line = EventFd::new(EFD_NONBLOCK).unwrap();
    let mut restored =
        Serial::restore(line.try_clone().unwrap(), Box::new(Sink::default()), &state).unwrap();
    assert_eq!(restored.save(), state);
    assert!(line.read().is_ok(), "a pending interrupt is raised again");
    assert_eq!(read(&mut restored, 7), 0x5a);
    let mut got = [0; 3];
    restored.read(DATA, &mut got);
    assert_eq!(&got, b"ls\n");
}

#[test]
fn a_pending_interrupt_is_raised_again_until_it_is_handled() {
    let (mut serial, line, _) = port();
    let rings = |serial: &Serial| {
        serial.repeat();
        line.read().is_ok()
    };
    serial.input(b"a");
    assert!(!rings(&serial), "the interrupt is not enabled");
    serial.read(DATA, &mut [0]);
    serial.write(IER, &[RECEIVED_INTERRUPT]);
    serial.input(b"b");
    assert!(rings(&serial) && rings(&serial));
    serial.read(DATA, &mut [0]);
    assert!(!rings(&serial), "all is read");

    serial.write(IER, &[TRANSMITTED_INTERRUPT]);
    serial.write(DATA, b"c");
    assert!(rings(&serial));
    read(&mut serial, IIR);
    assert!(!rings(&serial), "the guest has read IIR");
}

#[test]
fn a_state_with_more_input_than_fits_is_refused() {
    let (serial, line, _) = port();
    let mut state = serial.save();
    state.received = vec![0; FIFO_BYTES + 1];
    assert!(Serial::restore(line, Box::new(Sink::default()), &state).is_err());
}

proptest! {
    #[test]
    fn no_sequence_of_accesses_panics(
        accesses in proptest::collection::vec((any::<bool>(), 0u64..10, proptest::collection::vec(any::<u8>(), 0..5)), 0..200),
    ) {
        let (mut serial, _, _) = port();
        for (is_write, register, mut data) in accesses {
            serial.input(&data);
            if is_write {
                serial.write(register, &data);
            } else {
                serial.read(register, &mut data);
            }
        }
        prop_assert!(serial.save().received.len() <= FIFO_BYTES);
    }
}
