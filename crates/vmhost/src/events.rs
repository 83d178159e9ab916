//! The event bus: events of VMs, images, snapshots, volumes and networks, for all subscribers.
//!
//! Tasks of VMs and the node's use cases publish; the API's streams and the node's own background
//! work subscribe. Publishing never waits: a subscriber that is more than [`CAPACITY`] events
//! behind is told how many it missed.

use jiffy_content::clock::unix_millis;
use jiffy_content::model::vm::VmRecord;
use jiffy_wire::api::{Action, Event, Subject, VmState};
use std::sync::Arc;
use tokio::sync::broadcast::{
    self,
    error::{RecvError, TryRecvError},
};

/// Events that a slow subscriber may be behind. The bus keeps this many.
const CAPACITY: usize = 1024;

/// The node's event bus.
#[derive(Debug)]
pub struct EventBus(broadcast::Sender<Published>);

/// An event, and who may see it.
#[derive(Debug, Clone)]
struct Published {
    event: Arc<Event>,
    /// It is of a VM of the node's own, which no user sees.
    hidden: bool,
}

/// A subscriber to the bus.
#[derive(Debug)]
pub struct Subscription(broadcast::Receiver<Published>);

/// What a subscriber receives.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Received {
    /// An event.
    Event(Arc<Event>),
    /// So many events were dropped, because this subscriber was too slow.
    Missed(u64),
}

impl Default for EventBus {
    fn default() -> EventBus {
        EventBus(broadcast::Sender::new(CAPACITY))
    }
}

impl EventBus {
    /// Receives what is published from now on.
    pub fn subscribe(&self) -> Subscription {
        Subscription(self.0.subscribe())
    }

    /// Publishes an event of an image, a snapshot, a volume or a network.
    pub fn publish(&self, subject: Subject, action: Action, name: &str) {
        self.send(false, || Event {
            time_ms: unix_millis(),
            subject,
            action,
            id: None,
            name: name.to_owned(),
            exit: None,
            detail: None,
        });
    }

    /// Publishes an event of a VM.
    pub fn publish_vm(&self, action: Action, vm: &VmRecord) {
        self.send(vm.spec.hidden, || {
            let shown = (action == Action::Exited).then(|| vm.view());
            let (exit, detail) = shown.map_or((None, None), |vm| (vm.exit, vm.error));
            Event {
                time_ms: unix_millis(),
                subject: Subject::Vm,
                action,
                id: Some(vm.id.clone()),
                name: vm.name.clone(),
                exit,
                detail,
            }
        });
    }

    fn send(&self, hidden: bool, event: impl FnOnce() -> Event) {
        if self.0.receiver_count() == 0 {
            return;
        }
        let event = Arc::new(event());
        // Fails only if the last subscriber has left meanwhile.
        let _ = self.0.send(Published { event, hidden });
    }
}

/// The action that stands for this new state.
pub(crate) fn action_of(state: VmState) -> Action {
    match state {
        VmState::Created => Action::Created,
        VmState::Starting => Action::Starting,
        VmState::Running => Action::Running,
        VmState::Paused => Action::Paused,
        VmState::Stopping => Action::Stopping,
        VmState::Hibernated => Action::Hibernated,
        VmState::Exited => Action::Exited,
    }
}

impl Subscription {
    /// The next event that users may see; never ends as long as the bus exists.
    pub async fn next(&mut self) -> Option<Received> {
        loop {
            match self.0.recv().await {
                Ok(Published { hidden: true, .. }) => {}
                Ok(Published { event, .. }) => return Some(Received::Event(event)),
                Err(RecvError::Lagged(missed)) => return Some(Received::Missed(missed)),
                Err(RecvError::Closed) => return None,
            }
        }
    }

    /// The next event that users may see, if one was published already.
    pub fn published(&mut self) -> Option<Received> {
        loop {
            match self.0.try_recv() {
                Ok(Published { hidden: true, .. }) => {}
                Ok(Published { event, .. }) => return Some(Received::Event(event)),
                Err(TryRecvError::Lagged(missed)) => return Some(Received::Missed(missed)),
                Err(TryRecvError::Empty | TryRecvError::Closed) => return None,
            }
        }
    }

    /// Waits until a VM that users see begins to run, or may have.
    pub async fn vm_runs(&mut self) {
        let runs = |event: &Event| event.subject == Subject::Vm && event.action == Action::Running;
        while let Some(Received::Event(event)) = self.next().await
            && !runs(&event)
        {}
    }

    /// Waits until a VM, hidden or not, has ended or was removed, or may have.
    pub async fn vm_ends(&mut self) {
        let ends = |event: &Event| matches!(event.action, Action::Exited | Action::Removed);
        while let Ok(Published { event, .. }) = self.0.recv().await
            && !(event.subject == Subject::Vm && ends(&event))
        {}
    }

    /// Drops what was published until now.
    pub fn skip(&mut self) {
        self.0 = self.0.resubscribe();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;
    use jiffy_content::model::vm::Spec;

    fn record(name: &str) -> VmRecord {
        VmRecord::new("0123456789ab".into(), name.into(), Spec::default(), 3)
    }

    fn event(received: Option<Received>) -> Arc<Event> {
        match received {
            Some(Received::Event(event)) => event,
            other => panic!("not an event: {other:?}"),
        }
    }

    #[tokio::test]
    async fn a_subscriber_receives_what_is_published_after_it_came() {
        let bus = EventBus::default();
        bus.publish(Subject::Volume, Action::Created, "early");
        let mut subscription = bus.subscribe();
        bus.publish(Subject::Volume, Action::Created, "data");
        let seen = event(subscription.next().await);
        assert_eq!(
            (seen.subject, seen.action, seen.name.as_str()),
            (Subject::Volume, Action::Created, "data")
        );
        assert!(subscription.next().now_or_never().is_none());
    }

    #[tokio::test]
    async fn a_slow_subscriber_is_told_how_many_events_it_missed() {
        let bus = EventBus::default();
        let mut subscription = bus.subscribe();
        for number in 0..CAPACITY + 3 {
            bus.publish(Subject::Image, Action::Created, &number.to_string());
        }
        assert_eq!(subscription.next().await, Some(Received::Missed(3)));
        assert_eq!(event(subscription.next().await).name, "3");
    }

    #[tokio::test]
    async fn events_of_hidden_vms_are_for_the_node_only() {
        let bus = EventBus::default();
        let (mut user, mut node) = (bus.subscribe(), bus.subscribe());
        let mut hidden = record("golden");
        Arc::make_mut(&mut hidden.spec).hidden = true;
        bus.publish_vm(Action::Running, &hidden);
        bus.publish_vm(Action::Removed, &hidden);
        assert!(user.next().now_or_never().is_none());
        assert!(node.vm_ends().now_or_never().is_some());
    }

    #[tokio::test]
    async fn waits_end_with_the_event_they_wait_for() {
        let bus = EventBus::default();
        let (mut runs, mut ends) = (bus.subscribe(), bus.subscribe());
        bus.publish_vm(Action::Starting, &record("web"));
        bus.publish(Subject::Image, Action::Removed, "web");
        assert!(runs.vm_runs().now_or_never().is_none());
        assert!(ends.vm_ends().now_or_never().is_none());
        bus.publish_vm(Action::Running, &record("web"));
        assert!(runs.vm_runs().now_or_never().is_some());
        bus.publish_vm(Action::Exited, &record("web"));
        assert!(ends.vm_ends().now_or_never().is_some());
    }
}
