//! The stream of events for clients.

use super::Node;
use jiffy_content::clock::unix_millis;
use jiffy_content::error::Result;
use jiffy_vmhost::events::{Received, Subscription};
use jiffy_wire::api::{Action, Event, Subject};

/// Events from now on.
#[derive(Debug)]
pub struct Events {
    subscription: Subscription,
    /// Only of the VM with this id.
    vm: Option<String>,
    over: bool,
}

impl Node {
    /// Events from now on; only of one VM, if one is given.
    pub fn events(&self, vm: Option<&str>) -> Result<Events> {
        let subscription = self.host.events.subscribe();
        let vm = vm.map(|vm| self.registry.find(vm)).transpose()?;
        Ok(Events {
            subscription,
            vm: vm.map(|vm| vm.id.clone()),
            over: false,
        })
    }
}

impl Events {
    /// The next event; `None` when the VM was removed.
    pub async fn next(&mut self) -> Option<Event> {
        while !self.over {
            match self.subscription.next().await? {
                Received::Missed(missed) => return Some(missed_events(missed)),
                Received::Event(event) if self.vm.is_none() || event.id == self.vm => {
                    self.over = self.vm.is_some() && event.action == Action::Removed;
                    return Some(Event::clone(&event));
                }
                Received::Event(_) => {}
            }
        }
        None
    }
}

fn missed_events(missed: u64) -> Event {
    Event {
        time_ms: unix_millis(),
        subject: Subject::Events,
        action: Action::Missed,
        id: None,
        name: String::new(),
        exit: None,
        detail: Some(format!(
            "{missed} events are missing, because they were not read in time"
        )),
    }
}
