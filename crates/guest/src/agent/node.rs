//! Messages to and from the node.

use super::run::Agent;
use crate::service::Line;
use crate::supervisor::link::Event;
use alloc::{format, vec::Vec};
use jiffy_wire::agent::{FromGuest, ToGuest};

/// Most bytes of service lines that are kept while the node is away.
const LOG_LIMIT: usize = 256 * 1024;

impl Agent {
    pub(super) fn link_ready(&mut self, now: u64) {
        let mut events = Vec::new();
        self.options
            .link
            .ready(now, &mut self.space, |event| events.push(event));
        for event in events {
            match event {
                Event::Welcome { stdout, stderr } => {
                    self.ready_sent = false;
                    if let Some(first) = &mut self.first {
                        first.resume(stdout, stderr);
                    }
                }
                Event::Lost => self.link_lost(),
                Event::Message(message) => self.handle_message(message),
            }
        }
    }

    pub(super) fn link_lost(&mut self) {
        if let Some(first) = &mut self.first {
            first.disconnected();
        }
    }

    fn handle_message(&mut self, message: ToGuest) {
        let Some(first) = &mut self.first else { return };
        match message {
            ToGuest::MainOutputStored {
                stdout_offset,
                stderr_offset,
            } => {
                first.confirm(stdout_offset, stderr_offset);
            }
            ToGuest::MainInput(input) => first.input(input),
            ToGuest::MainEndStored => first.confirm_end(),
            ToGuest::Welcome { .. } => {}
        }
    }

    pub(super) fn log_lines(&mut self, lines: Vec<Line>) {
        for (name, line) in lines {
            if self.options.link.is_absent() {
                self.options.console.write_line(&name, &line);
                continue;
            }
            self.log_bytes += line.len();
            self.log.push_back((name, line));
            while self.log_bytes > LOG_LIMIT
                && let Some((_, oldest)) = self.log.pop_front()
            {
                self.log_bytes -= oldest.len();
                self.log_lost += 1;
            }
        }
    }

    /// Sends the node everything it does not have yet, as far as there is room.
    pub(super) fn send_to_node(&mut self, now: u64) {
        let Some(stream) = self.options.link.up() else {
            if self.options.link.is_absent()
                && let Some(first) = &mut self.first
            {
                first.write_to(&mut self.options.console);
            }
            return;
        };
        let report = &mut self.options.report;
        // Before it is ready: who waits for that is shown what is missing.
        for warning in report.take_warnings() {
            stream.send(&warning);
        }
        if !self.ready_sent {
            self.ready_sent = true;
            stream.send(&FromGuest::Ready);
        }
        for spans in report.take_spans() {
            stream.send(&spans);
        }
        if self.log_lost > 0 && stream.has_room() {
            let message = format!("{} lines of services were lost", self.log_lost);
            stream.send(&FromGuest::Warning {
                step: "services".into(),
                message,
            });
            self.log_lost = 0;
        }
        while stream.has_room()
            && let Some((name, line)) = self.log.pop_front()
        {
            self.log_bytes -= line.len();
            stream.send(&FromGuest::ServiceLog { name, line });
        }
        if let Some(first) = &mut self.first {
            first.send_pending(stream);
            first.send_end(stream);
        }
        if !self.options.link.flush(now) {
            self.link_lost();
        }
    }
}
