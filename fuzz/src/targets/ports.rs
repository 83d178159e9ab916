//! The devices at I/O ports (serial, power, clock, trace), of which a guest reads and
//! writes any port with any width, also between saving and restoring.

use crate::Target;
use crate::input::Input;
use jiffy_devices::bus::BusDevice;
use jiffy_devices::power::{KeyboardController, PowerPort, PowerSwitch};
use jiffy_devices::rtc::Rtc;
use jiffy_devices::serial::{ConsoleLog, Serial};
use jiffy_devices::trace::TracePort;
use std::sync::Arc;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// This target.
pub const TARGET: Target = Target {
    name: "ports",
    covers: &[
        "crates/devices/src/power",
        "crates/devices/src/rtc",
        "crates/devices/src/serial",
        "crates/devices/src/trace",
    ],
    seeds: all_seeds,
    run,
};

/// Marks that are passed on.
const MARKS: u64 = 8;

const WRITE: u8 = 0x80;
const SAVE: u8 = 0x7f;
const TYPE: u8 = 0x7e;
const REPEAT: u8 = 0x7d;

struct Board {
    serial: Serial,
    keyboard: KeyboardController,
    power: PowerPort,
    rtc: Rtc,
    trace: TracePort,
    switch: Arc<PowerSwitch>,
}

fn line() -> EventFd {
    EventFd::new(EFD_NONBLOCK).expect("an event descriptor")
}

fn console() -> Box<ConsoleLog> {
    let path = crate::scratch::folder().join("console.log");
    Box::new(ConsoleLog::open(&path).expect("a log"))
}

impl Board {
    fn new() -> Board {
        let switch = Arc::new(PowerSwitch::new().expect("an event descriptor"));
        Board {
            serial: Serial::new(line(), console()).expect("a serial port"),
            keyboard: KeyboardController::new(switch.clone()),
            power: PowerPort::new(switch.clone()),
            rtc: Rtc::new(),
            trace: TracePort::new(MARKS, Box::new(|_| {})),
            switch,
        }
    }

    fn device(&mut self, number: u8) -> &mut dyn BusDevice {
        match number % 5 {
            0 => &mut self.serial,
            1 => &mut self.keyboard,
            2 => &mut self.power,
            3 => &mut self.rtc,
            _ => &mut self.trace,
        }
    }

    /// What is saved is restored as it was.
    fn save_and_restore(&mut self) {
        let state = self.serial.save();
        self.serial = Serial::restore(line(), console(), &state).expect("what was saved");
        assert_eq!(self.serial.save(), state);
        let state = self.keyboard.save();
        self.keyboard = KeyboardController::restore(self.switch.clone(), &state);
        assert_eq!(self.keyboard.save(), state);
        let state = self.rtc.save();
        self.rtc = Rtc::restore(&state);
        assert_eq!(self.rtc.save(), state);
        let state = self.trace.save();
        self.trace = TracePort::restore(MARKS, Box::new(|_| {}), &state);
        // Marks are counted from zero again.
        assert_eq!(
            (self.trace.save().limit, self.trace.save().written),
            (state.limit, 0)
        );
    }
}

fn run(data: &[u8]) {
    let mut board = Board::new();
    let mut input = Input(data);
    let mut buffer = [0; 16];
    while !input.is_empty() {
        let operation = input.u8();
        match operation {
            SAVE => board.save_and_restore(),
            TYPE => {
                let count = usize::from(input.u8());
                board.serial.input(input.bytes(count));
            }
            REPEAT => board.serial.repeat(),
            _ => {
                let access = input.u8();
                let offset = u64::from(access & 0x0f);
                let count = usize::from(access >> 4) + 1;
                if operation & WRITE != 0 {
                    let bytes = input.bytes(count);
                    board.device(operation & !WRITE).write(offset, bytes);
                } else {
                    board.device(operation).read(offset, &mut buffer[..count]);
                }
            }
        }
    }
    board.save_and_restore();
    assert_eq!(board.trace.dropped(), 0, "what came before is not counted");
}

fn all_seeds() -> Vec<Vec<u8>> {
    let write = |device: u8, offset: u8, byte: u8| vec![WRITE | device, offset, byte];
    let read = |device: u8, offset: u8| vec![device, offset];
    let text: Vec<u8> = b"a line\n"
        .iter()
        .flat_map(|byte| write(0, 0, *byte))
        .collect();
    let typed = [&[TYPE, 3][..], b"ab\n"].concat();
    let interrupts = write(0, 1, 0x0f);
    let loopback = [write(0, 4, 0x1f), write(0, 0, b'x'), read(0, 5), read(0, 0)].concat();
    let clock: Vec<u8> = (0..0x40)
        .flat_map(|index| [write(3, 0, index), read(3, 1)].concat())
        .collect();
    let marks: Vec<u8> = (0..12).flat_map(|mark| write(4, 0, mark)).collect();
    vec![
        [text, vec![SAVE], loopback].concat(),
        [
            interrupts,
            typed,
            read(0, 2),
            read(0, 5),
            read(0, 0),
            vec![REPEAT, SAVE],
        ]
        .concat(),
        [write(1, 4, 0x20), read(1, 4), read(1, 0), write(1, 4, 0xfe)].concat(),
        [
            write(1, 4, 0xd1),
            vec![SAVE],
            write(1, 0, 3),
            write(2, 0, 0x34),
        ]
        .concat(),
        [clock, marks].concat(),
    ]
}
