//! The stream of events for clients.

use super::Node;
use jiffy_content::clock::unix_millis;
use jiffy_content::error::Result;
use jiffy_vmhost::events::{Received, Subscription};
use jiffy_vmhost::handle::View;
use jiffy_wire::api::{Action, Event, Subject};
use tokio::sync::watch;

/// Events from now on.
#[derive(Debug)]
pub struct Events {
    subscription: Subscription,
    /// Only of this VM.
    of: Option<Of>,
}

/// A VM.
#[derive(Debug)]
struct Of {
    id: String,
    view: watch::Receiver<View>,
}

impl Node {
    /// Events from now on; only of one VM, if one is given.
    ///
    /// # Errors
    ///
    /// If there is no such VM.
    pub fn events(&self, vm: Option<&str>) -> Result<Events> {
        let subscription = self.host.events.subscribe();
        let vm = vm.map(|vm| self.registry.find(vm)).transpose()?;
        let of = vm.map(|vm| Of {
            id: vm.id.clone(),
            view: vm.view.clone(),
        });
        Ok(Events { subscription, of })
    }
}

impl Events {
    /// The next event; `None` when the VM was removed.
    pub async fn next(&mut self) -> Option<Event> {
        loop {
            let received = match &mut self.of {
                None => self.subscription.next().await?,
                // The event of its removal may have been dropped, or is hidden.
                Some(Of { view, .. }) => tokio::select! {
                    received = self.subscription.next() => received?,
                    _ = view.wait_for(|view| view.removed) => self.subscription.published()?,
                },
            };
            match received {
                Received::Missed(missed) => return Some(missed_events(missed)),
                Received::Event(event) if self.is_wanted(&event) => {
                    return Some(Event::clone(&event));
                }
                Received::Event(_) => {}
            }
        }
    }

    fn is_wanted(&self, event: &Event) -> bool {
        let Some(Of { id, .. }) = &self.of else {
            return true;
        };
        event.id.as_ref() == Some(id)
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

#[cfg(test)]
mod tests {
    use super::*;
    use jiffy_content::model::vm::{Spec, VmRecord};
    use jiffy_vmhost::events::EventBus;
    use std::sync::Arc;

    fn view_of(record: &VmRecord) -> View {
        View {
            vm: record.view(),
            main: record.main.clone(),
            main_pid: None,
            failure: None,
            log_start: 0,
            wakes: false,
            held_up: None,
            root: None,
            paged: None,
            leaving: false,
            removed: false,
            refusal: None,
        }
    }

    /// The events of a VM that is removed after this many others; the client reads them afterwards.
    async fn events_of_removed(record: &VmRecord, others: usize) -> Vec<Action> {
        let bus = EventBus::default();
        let view = watch::Sender::new(view_of(record));
        let mut events = Events {
            subscription: bus.subscribe(),
            of: Some(Of {
                id: record.id.clone(),
                view: view.subscribe(),
            }),
        };
        let other = |_| bus.publish(Subject::Image, Action::Created, "other");
        bus.publish_vm(Action::Exited, record);
        bus.publish_vm(Action::Removed, record);
        view.send_modify(|view| view.removed = true);
        (0..others).for_each(other);
        let mut seen = Vec::new();
        while let Some(event) = events.next().await {
            seen.push(event.action);
        }
        seen
    }

    #[tokio::test]
    async fn events_of_a_removed_vm_end_also_if_its_last_event_was_missed_or_is_hidden() {
        let mut vm = VmRecord::new("0123456789ab".into(), "web".into(), Spec::default(), 3);
        let both = [Action::Exited, Action::Removed];
        assert_eq!(events_of_removed(&vm, 0).await, both);
        assert_eq!(events_of_removed(&vm, 100).await, both);
        assert_eq!(events_of_removed(&vm, 5000).await, [Action::Missed]);
        Arc::make_mut(&mut vm.spec).hidden = true;
        assert_eq!(events_of_removed(&vm, 0).await, []);
    }
}
