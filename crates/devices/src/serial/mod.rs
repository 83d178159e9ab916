//! COM1: a 16550A, at port 0x3f8 with interrupt 4.
//!
//! The registers are `vm-superio`'s. This module connects them with the bus and adds input with
//! back-pressure. [`ConsoleLog`] keeps the output in a file of limited size.

mod console_log;
#[cfg(test)]
mod tests;

pub use console_log::ConsoleLog;

use crate::bus::BusDevice;
use serde::{Deserialize, Serialize};
use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use thiserror::Error;
use vm_superio::Trigger;
use vm_superio::serial::{Serial as Uart, SerialEvents, SerialState as UartState};
use vmm_sys_util::eventfd::EventFd;

/// First port.
pub const PORT: u64 = 0x3f8;
/// Number of ports.
pub const PORTS: u64 = 8;
/// Interrupt line.
pub const IRQ: u32 = 4;

/// A serial port.
///
/// Output goes to a [`Write`], byte by byte. A blocking writer delays the vCPU, as a slow
/// line would; bytes that it refuses are lost and counted. [`input`](Serial::input) takes as many
/// bytes as fit into the receive buffer; when the guest has emptied it,
/// [`drained`](Serial::drained) becomes readable.
pub struct Serial {
    uart: Uart<Line, Arc<Events>, Box<dyn Write + Send>>,
    events: Arc<Events>,
}

/// A saved serial port: the UART's registers and its receive buffer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SerialState {
    /// Divisor latch, low byte.
    pub divisor_low: u8,
    /// Divisor latch, high byte.
    pub divisor_high: u8,
    /// IER.
    pub interrupt_enable: u8,
    /// IIR.
    pub interrupt_identification: u8,
    /// LCR.
    pub line_control: u8,
    /// LSR.
    pub line_status: u8,
    /// MCR.
    pub modem_control: u8,
    /// MSR.
    pub modem_status: u8,
    /// SCR.
    pub scratch: u8,
    /// Received bytes that were not read yet, at most 64.
    pub received: Vec<u8>,
}

/// Why a serial port could not be created.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SerialError {
    /// The event descriptor of `drained` could not be created.
    #[error("an event descriptor for the serial port could not be created")]
    Event(#[source] io::Error),
    /// The saved receive buffer is larger than the port's, or the interrupt could not be raised
    /// again.
    #[error("the saved state of the serial port is not valid")]
    State,
}

impl Serial {
    /// A port after reset. `line` is its interrupt (an irqfd, edge).
    ///
    /// # Errors
    ///
    /// If the event descriptor of [`drained`](Serial::drained) can't be created.
    pub fn new(line: EventFd, output: Box<dyn Write + Send>) -> Result<Serial, SerialError> {
        Serial::with(&UartState::default(), line, output)
    }

    /// Restores a saved port.
    ///
    /// # Errors
    ///
    /// As for [`new`](Serial::new), and [`SerialError::State`] if the state is not valid.
    pub fn restore(
        line: EventFd,
        output: Box<dyn Write + Send>,
        state: &SerialState,
    ) -> Result<Serial, SerialError> {
        Serial::with(&state.to_uart(), line, output)
    }

    fn with(
        state: &UartState,
        line: EventFd,
        output: Box<dyn Write + Send>,
    ) -> Result<Serial, SerialError> {
        let events = Arc::new(Events {
            drained: EventFd::new(vmm_sys_util::eventfd::EFD_NONBLOCK)
                .map_err(SerialError::Event)?,
            lost: AtomicU64::new(0),
        });
        let uart = Uart::from_state(state, Line(line), events.clone(), output)
            .map_err(|_| SerialError::State)?;
        Ok(Serial { uart, events })
    }

    /// The port's state.
    pub fn save(&self) -> SerialState {
        SerialState::from_uart(self.uart.state())
    }

    /// Passes bytes to the guest; returns how many fitted. Pass the rest once
    /// [`drained`](Serial::drained) is readable.
    pub fn input(&mut self, bytes: &[u8]) -> usize {
        // Besides a full buffer, only raising the interrupt can fail, and then the bytes are in the
        // buffer already.
        let room = self.uart.fifo_capacity();
        match self.uart.enqueue_raw_bytes(bytes) {
            Ok(taken) => taken,
            Err(_) => room - self.uart.fifo_capacity(),
        }
    }

    /// Raises the interrupt again if the guest has not handled it yet: the edge may have been
    /// lost with the interrupt controller's old state.
    pub fn repeat(&self) {
        let state = self.uart.state();
        let (enabled, identified) = (state.interrupt_enable, state.interrupt_identification);
        // The bits differ between the two registers.
        let received = enabled & 1 != 0 && identified & 4 != 0;
        let transmitted = enabled & 2 != 0 && identified & 2 != 0;
        if (received || transmitted)
            && let Err(error) = self.uart.interrupt_evt().trigger()
        {
            tracing::error!(%error, "the serial port's interrupt could not be delivered");
        }
    }

    /// Readable after the guest read the last received byte.
    pub fn drained(&self) -> &EventFd {
        &self.events.drained
    }

    /// How many bytes the output refused.
    pub fn lost(&self) -> u64 {
        self.events.lost.load(Ordering::Relaxed)
    }
}

impl BusDevice for Serial {
    /// More than one byte is string input: each byte is a read of the same register.
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        let register = offset.min(PORTS) as u8;
        for byte in data {
            *byte = self.uart.read(register);
        }
    }

    /// More than one byte is string output: all bytes go to the same register.
    fn write(&mut self, offset: u64, data: &[u8]) {
        let register = offset.min(PORTS) as u8;
        for byte in data {
            // Lost bytes are counted by `Events`; a real line does not report them to the guest
            // either.
            let _ = self.uart.write(register, *byte);
        }
    }
}

impl SerialState {
    fn from_uart(uart: UartState) -> SerialState {
        SerialState {
            divisor_low: uart.baud_divisor_low,
            divisor_high: uart.baud_divisor_high,
            interrupt_enable: uart.interrupt_enable,
            interrupt_identification: uart.interrupt_identification,
            line_control: uart.line_control,
            line_status: uart.line_status,
            modem_control: uart.modem_control,
            modem_status: uart.modem_status,
            scratch: uart.scratch,
            received: uart.in_buffer,
        }
    }

    fn to_uart(&self) -> UartState {
        UartState {
            baud_divisor_low: self.divisor_low,
            baud_divisor_high: self.divisor_high,
            interrupt_enable: self.interrupt_enable,
            interrupt_identification: self.interrupt_identification,
            line_control: self.line_control,
            line_status: self.line_status,
            modem_control: self.modem_control,
            modem_status: self.modem_status,
            scratch: self.scratch,
            in_buffer: self.received.clone(),
        }
    }
}

struct Line(EventFd);

impl Trigger for Line {
    type E = io::Error;

    fn trigger(&self) -> io::Result<()> {
        self.0.write(1)
    }
}

struct Events {
    drained: EventFd,
    lost: AtomicU64,
}

impl SerialEvents for Events {
    fn buffer_read(&self) {}
    fn out_byte(&self) {}

    fn tx_lost_byte(&self) {
        self.lost.fetch_add(1, Ordering::Relaxed);
    }

    fn in_buffer_empty(&self) {
        // Fails only if the counter is full, and then the descriptor is readable anyway.
        let _ = self.drained.write(1);
    }
}
