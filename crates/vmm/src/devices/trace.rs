//! The port on which guest code marks events.

use super::error::DeviceError;
use super::kind::DeviceKind;
use super::wiring::Wiring;
use super::{Shared, shared};
use crate::gate;
use crate::mailbox::Notice;
use crate::sections::{Count, Section};
use jiffy_devices::trace::{TracePort, TraceState};
use jiffy_sys::clock;
use jiffy_sys::mutex::lock;
use jiffy_wire::trace::TRACE_PORT;
use jiffy_wire::vmm::VmmConfig;

/// Most marks of a guest that are passed on in its life; further ones are only counted.
const MARKS_MAX: u64 = 4096;

/// The trace port. A guest's reports about its new identity also go to the main thread.
#[derive(Debug)]
pub struct TraceKind;

impl DeviceKind for TraceKind {
    type Device = Shared<TracePort>;
    type State = TraceState;
    const SECTION: Section = Section::new("trace", 1);
    const NAME: &'static str = "a trace port";
    const COUNT: Count = Count::One;

    fn count(_config: &VmmConfig) -> usize {
        1
    }

    fn attach(
        wiring: &mut Wiring<'_>,
        _number: usize,
        state: Option<&TraceState>,
    ) -> Result<Shared<TracePort>, DeviceError> {
        let (events, mailbox) = (wiring.args.events.clone(), wiring.args.mailbox.clone());
        let sink = Box::new(move |mark| {
            events.mark(mark, clock::monotonic_ns());
            if let Some(passed) = gate::passed(mark) {
                mailbox.push(Notice::Gate { passed });
            }
        });
        let trace = shared(match state {
            None => TracePort::new(MARKS_MAX, sink),
            Some(state) => TracePort::restore(MARKS_MAX, sink, state),
        });
        wiring.add_ports(TRACE_PORT.into(), 1, trace.clone())?;
        Ok(trace)
    }

    fn save(device: &Shared<TracePort>) -> Result<TraceState, DeviceError> {
        Ok(lock(device).save())
    }
}
