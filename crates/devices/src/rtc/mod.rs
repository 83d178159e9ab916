//! The PC's clock and its memory (Motorola MC146818), ports 0x70 and 0x71.
//!
//! It returns the host's time, in UTC, and never interrupts. Without it, an operating system waits
//! a second for the clock's "update in progress" bit to clear; one without a paravirtual clock
//! reads the date from it.

#[cfg(test)]
mod tests;

use crate::bus::BusDevice;
use serde::{Deserialize, Serialize};
use std::time::{SystemTime, UNIX_EPOCH};

/// First port: the register selector.
pub const PORT: u64 = 0x70;
/// Number of ports.
pub const PORTS: u64 = 2;

const SELECT: u64 = 0;
const DATA: u64 = 1;

/// Bit 7 of the selector masks the non-maskable interrupt and does not belong to the register's
/// number.
const REGISTER_MASK: u8 = 0x7f;

const SECONDS: u8 = 0x00;
const MINUTES: u8 = 0x02;
const HOURS: u8 = 0x04;
const DAY_OF_WEEK: u8 = 0x06;
const DAY: u8 = 0x07;
const MONTH: u8 = 0x08;
const YEAR: u8 = 0x09;
const STATUS_A: u8 = 0x0a;
const STATUS_B: u8 = 0x0b;
const STATUS_C: u8 = 0x0c;
const STATUS_D: u8 = 0x0d;
const CENTURY: u8 = 0x32;

/// 32.768 kHz time base, 1024 Hz rate, no update in progress.
const STATUS_A_VALUE: u8 = 0x26;
/// 24 hours a day, BCD digits, no interrupts.
const STATUS_B_VALUE: u8 = 0x02;
/// The battery is good.
const STATUS_D_VALUE: u8 = 0x80;

/// The clock. The guest can't set it; its writes are ignored.
pub struct Rtc {
    now: Box<dyn Fn() -> u64 + Send>,
    selected: u8,
}

/// A saved clock: only the selected register, because the time is the host's.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RtcState {
    /// The selected register.
    pub selected: u8,
}

impl Default for Rtc {
    fn default() -> Rtc {
        Rtc::new()
    }
}

impl Rtc {
    /// A clock that returns the host's time.
    pub fn new() -> Rtc {
        Rtc::restore(&RtcState::default())
    }

    /// Restores a saved clock.
    pub fn restore(state: &RtcState) -> Rtc {
        Rtc {
            now: Box::new(host_seconds),
            selected: state.selected & REGISTER_MASK,
        }
    }

    /// The clock's state.
    pub fn save(&self) -> RtcState {
        RtcState {
            selected: self.selected,
        }
    }

    fn register(&self) -> u8 {
        match self.selected {
            STATUS_A => STATUS_A_VALUE,
            STATUS_B => STATUS_B_VALUE,
            STATUS_C => 0,
            STATUS_D => STATUS_D_VALUE,
            register => Date::from_unix((self.now)()).register(register),
        }
    }
}

impl BusDevice for Rtc {
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        // The selector can't be read on real hardware either.
        let value = if offset == DATA {
            self.register()
        } else {
            0xff
        };
        data.fill(value);
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        if let (SELECT, Some(register)) = (offset, data.first()) {
            self.selected = register & REGISTER_MASK;
        }
    }
}

/// Seconds since 1970 by the host's clock.
fn host_seconds() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs())
}

/// A date and time in the civil calendar, UTC.
#[derive(Debug, PartialEq, Eq)]
struct Date {
    year: u64,
    month: u64,
    day: u64,
    /// Day of the week; 1 is Sunday.
    weekday: u64,
    hours: u64,
    minutes: u64,
    seconds: u64,
}

impl Date {
    fn from_unix(seconds: u64) -> Date {
        let days = seconds / 86_400;
        let (year, month, day) = civil(days);
        Date {
            year,
            month,
            day,
            // 1970-01-01 was a Thursday, the fifth day.
            weekday: (days + 4) % 7 + 1,
            hours: seconds / 3600 % 24,
            minutes: seconds / 60 % 60,
            seconds: seconds % 60,
        }
    }

    /// A date register's value, in BCD; other registers are zero.
    fn register(&self, register: u8) -> u8 {
        let value = match register {
            SECONDS => self.seconds,
            MINUTES => self.minutes,
            HOURS => self.hours,
            DAY_OF_WEEK => self.weekday,
            DAY => self.day,
            MONTH => self.month,
            YEAR => self.year % 100,
            CENTURY => self.year / 100 % 100,
            _ => return 0,
        };
        ((value / 10) << 4) as u8 | (value % 10) as u8
    }
}

/// Year, month and day for a number of days since 1970-01-01 (Gregorian).
fn civil(mut days: u64) -> (u64, u64, u64) {
    const DAYS_IN_400_YEARS: u64 = 146_097;
    let mut year = 1970 + days / DAYS_IN_400_YEARS * 400;
    days %= DAYS_IN_400_YEARS;
    let leap = |year: u64| {
        (year.is_multiple_of(4) && !year.is_multiple_of(100)) || year.is_multiple_of(400)
    };
    loop {
        let length = if leap(year) { 366 } else { 365 };
        if days < length {
            break;
        }
        days -= length;
        year += 1;
    }
    let february = if leap(year) { 29 } else { 28 };
    let mut month = 1;
    for length in [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31] {
        if days < length {
            break;
        }
        days -= length;
        month += 1;
    }
    (year, month, days + 1)
}
