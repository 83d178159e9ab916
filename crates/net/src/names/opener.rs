//! Opens the addresses of allowed names to VMs, and remembers which are open.

use super::directory::{Asker, Directory};
use crate::policy::Access;
use crate::{Error, VmId};
use jiffy_sys::mutex::lock;
use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::sync::{Mutex as AsyncMutex, OwnedMutexGuard};
use tokio::task::spawn_blocking;

/// For how long it is not checked again that an address is open: another program may have removed
/// the rules.
const REMEMBERED: Duration = Duration::from_secs(30);
/// Most open addresses that are remembered.
const REMEMBERED_MAX: usize = 1 << 14;
/// An address that stays open for this much less than wanted is not opened again: an answer's age
/// is measured a little later than its addresses were opened.
const SLACK: Duration = Duration::from_secs(1);

/// Least time between two warnings that addresses could not be opened.
const WARN_INTERVAL: Duration = Duration::from_secs(60);

/// Addresses, each with its time, by the ports at which they are opened.
type ByPorts = Vec<(Access, Vec<(IpAddr, Duration)>)>;

/// Opens addresses to a VM: a locked [`crate::rules::NameRules`].
pub trait Open: Send + Sync + 'static {
    /// Opens these addresses at these ports, each for its time, before it returns.
    ///
    /// # Errors
    ///
    /// If the kernel refuses it.
    fn open(&self, vm: VmId, at: Access, addresses: &[(IpAddr, Duration)]) -> Result<(), Error>;
}

impl Open for Mutex<crate::rules::NameRules> {
    fn open(&self, vm: VmId, at: Access, addresses: &[(IpAddr, Duration)]) -> Result<(), Error> {
        let mut rules = lock(self);
        rules.open(vm, at, addresses)
    }
}

/// Opens addresses for one query at a time. Of each VM one query at a time waits for that, so a VM
/// that asks for many names delays its own queries only.
pub(super) struct Opener {
    state: Arc<State>,
    turn: Arc<AsyncMutex<()>>,
    turns_of_one: Mutex<HashMap<VmId, Arc<AsyncMutex<()>>>>,
}

struct State {
    directory: Arc<Directory>,
    open: Box<dyn Open>,
    remembered: Mutex<HashMap<(VmId, Access, IpAddr), Remembered>>,
    /// When it last warned that addresses could not be opened: a guest can bring that about with
    /// every query.
    warned: Mutex<Option<Instant>>,
}

/// An address that was opened.
struct Remembered {
    /// The VM as it was then: after a change of its policy or its link the address may be closed.
    asker: Arc<Asker>,
    at: Instant,
    until: Instant,
}

impl Opener {
    pub fn new(directory: Arc<Directory>, open: impl Open) -> Opener {
        Opener {
            state: Arc::new(State {
                directory,
                open: Box::new(open),
                remembered: Mutex::default(),
                warned: Mutex::default(),
            }),
            turn: Arc::default(),
            turns_of_one: Mutex::default(),
        }
    }

    /// Opens the addresses of a name, each for its time, as far as the VM's policy allows it and
    /// they are not open yet. The rules are changed on another thread, because that blocks. `false`
    /// if that failed.
    pub async fn open(&self, asker: &Asker, name: &str, addresses: &[(IpAddr, Duration)]) -> bool {
        if self.state.missing(asker, name, addresses).1.is_empty() {
            return true;
        }
        let turns = self.turns(asker.vm).await;
        let (state, asker) = (self.state.clone(), asker.clone());
        let (name, addresses) = (name.to_owned(), addresses.to_owned());
        let work = spawn_blocking(move || {
            let opened = state.open(&asker, &name, &addresses);
            drop(turns);
            if let Err(error) = &opened
                && state.may_warn()
            {
                tracing::warn!(vm = %asker.vm, %error, "the addresses of an allowed name could not be opened");
            }
            opened.is_ok()
        });
        work.await.unwrap_or(false)
    }

    /// Waits for the VM's turn, first among its own queries.
    async fn turns(&self, vm: VmId) -> [OwnedMutexGuard<()>; 2] {
        let own = {
            let mut turns = lock(&self.turns_of_one);
            turns.retain(|_, turn| Arc::strong_count(turn) > 1);
            turns.entry(vm).or_default().clone()
        };
        let own = own.lock_owned().await;
        [self.turn.clone().lock_owned().await, own]
    }
}

impl State {
    fn open(
        &self,
        asker: &Asker,
        name: &str,
        addresses: &[(IpAddr, Duration)],
    ) -> Result<(), Error> {
        // The policy may have changed while the resolver was asked, or while others were served.
        let (current, missing) = self.missing(asker, name, addresses);
        for (at, addresses) in missing {
            let now = Instant::now();
            self.open.open(asker.vm, at, &addresses)?;
            if let Some(current) = &current {
                self.remember(current, at, &addresses, now);
            }
        }
        Ok(())
    }

    /// The addresses that are to be opened, and at which ports; and the VM as it is now.
    fn missing(
        &self,
        asker: &Asker,
        name: &str,
        addresses: &[(IpAddr, Duration)],
    ) -> (Option<Arc<Asker>>, ByPorts) {
        let current = self.directory.asker(asker.v4.into());
        let current = current.filter(|it| it.vm == asker.vm);
        let policy = current.as_ref().map_or(&asker.policy, |it| &it.policy);
        let now = Instant::now();
        let remembered = lock(&self.remembered);
        let is_open = |at, address, left| {
            let known = remembered.get(&(asker.vm, at, address));
            known.zip(current.as_ref()).is_some_and(|(known, current)| {
                Arc::ptr_eq(&known.asker, current)
                    && now.saturating_duration_since(known.at) < REMEMBERED
                    && known.until + SLACK >= now + left
            })
        };
        let missing = policy.opened_at(name).into_iter().filter_map(|at| {
            let is_missing = |it: &&(IpAddr, Duration)| !is_open(at, it.0, it.1);
            let of_these: Vec<_> = addresses.iter().filter(is_missing).copied().collect();
            (!of_these.is_empty()).then_some((at, of_these))
        });
        let missing = missing.collect();
        drop(remembered);
        (current, missing)
    }

    fn remember(
        &self,
        asker: &Arc<Asker>,
        at: Access,
        addresses: &[(IpAddr, Duration)],
        now: Instant,
    ) {
        let mut remembered = lock(&self.remembered);
        if remembered.len() + addresses.len() > REMEMBERED_MAX {
            remembered.retain(|_, it| now.saturating_duration_since(it.at) < REMEMBERED);
        }
        if remembered.len() + addresses.len() > REMEMBERED_MAX {
            remembered.clear();
        }
        for (address, left) in addresses {
            let opened = Remembered {
                asker: asker.clone(),
                at: now,
                until: now + *left,
            };
            remembered.insert((asker.vm, at, *address), opened);
        }
    }

    fn may_warn(&self) -> bool {
        let mut warned = lock(&self.warned);
        let may = warned.is_none_or(|last| last.elapsed() >= WARN_INTERVAL);
        if may {
            *warned = Some(Instant::now());
        }
        may
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::Policy;
    use std::net::Ipv4Addr;
    use std::sync::mpsc;
    use std::thread::sleep;
    use tokio::join;

    const PUBLIC: IpAddr = IpAddr::V4(Ipv4Addr::new(203, 0, 113, 9));
    const HOUR: Duration = Duration::from_secs(3600);
    const TIMEOUT: Duration = Duration::from_secs(60);

    /// Opens nothing, but says when it would.
    struct Recorder(Mutex<mpsc::Sender<VmId>>, Duration);

    impl Open for Recorder {
        fn open(&self, vm: VmId, _: Access, _: &[(IpAddr, Duration)]) -> Result<(), Error> {
            lock(&self.0).send(vm).expect("it is received");
            sleep(self.1);
            Ok(())
        }
    }

    fn asker(number: u8) -> Asker {
        let allow = ["a.example", "b.example:80"];
        Asker {
            vm: VmId::parse(&format!("{number:012x}")).expect("an id"),
            name: format!("vm{number}"),
            network: None,
            policy: Policy {
                allow: allow.map(|it| it.parse().expect("a rule")).into(),
                deny: vec!["all".parse().expect("a rule")],
            },
            v4: Ipv4Addr::new(10, 118, 0, number),
            v6: None,
        }
    }

    fn opener(takes: Duration) -> (Arc<Directory>, Opener, mpsc::Receiver<VmId>) {
        let directory = Arc::new(Directory::new(Ipv4Addr::new(10, 118, 0, 1), None));
        for number in 2..4 {
            directory.set(asker(number));
        }
        let (send, opened) = mpsc::channel();
        let opener = Opener::new(directory.clone(), Recorder(Mutex::new(send), takes));
        (directory, opener, opened)
    }

    #[tokio::test]
    async fn one_vms_queries_wait_for_each_other_and_no_other_vms() {
        let (_, opener, opened) = opener(Duration::from_millis(20));
        let (busy, other) = (asker(2), asker(3));
        let open = async |who: &Asker, last: u8| {
            let address = [203, 0, 113, last].into();
            assert!(opener.open(who, "a.example", &[(address, HOUR)]).await);
        };
        join!(
            open(&busy, 1),
            open(&busy, 2),
            open(&busy, 3),
            open(&busy, 4),
            open(&other, 1)
        );
        let order: Vec<VmId> = opened.try_iter().collect();
        assert_eq!(order.len(), 5);
        assert!(order[..2].contains(&other.vm), "{order:?}");
    }

    #[tokio::test]
    async fn the_thread_of_the_runtime_does_not_wait_for_the_kernel() {
        let (started, waits) = mpsc::channel();
        let (release, released) = mpsc::channel::<()>();
        struct Stuck(Mutex<(mpsc::Sender<()>, mpsc::Receiver<()>)>);
        impl Open for Stuck {
            fn open(&self, _: VmId, _: Access, _: &[(IpAddr, Duration)]) -> Result<(), Error> {
                let ends = lock(&self.0);
                ends.0.send(()).expect("it is received");
                ends.1.recv_timeout(TIMEOUT).expect("the runtime continues");
                Ok(())
            }
        }
        let (directory, _, _) = opener(Duration::ZERO);
        let opener = Opener::new(directory, Stuck(Mutex::new((started, released))));
        let one = asker(2);
        let addresses = [(PUBLIC, HOUR)];
        let opened = opener.open(&one, "a.example", &addresses);
        let continues = async {
            while waits.try_recv().is_err() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            release.send(()).expect("it waits");
        };
        assert!(join!(opened, continues).0);
    }

    #[tokio::test]
    async fn addresses_that_are_open_long_enough_are_not_opened_again() {
        let (directory, opener, opened) = opener(Duration::ZERO);
        let open = async |name: &str, left: Duration| {
            assert!(opener.open(&asker(2), name, &[(PUBLIC, left)]).await);
            opened.try_iter().count()
        };
        assert_eq!(open("a.example", HOUR).await, 1);
        assert_eq!(open("a.example", HOUR).await, 0);
        assert_eq!(open("a.example", HOUR / 2).await, 0);
        // For longer, or at other ports, it has to be opened.
        assert_eq!(open("a.example", 2 * HOUR).await, 1);
        assert_eq!(open("b.example", HOUR).await, 1);
        assert_eq!(open("c.example", HOUR).await, 0, "not allowed");
        // After a change of the VM, nothing is taken to be open.
        directory.set(asker(2));
        assert_eq!(open("a.example", HOUR).await, 1);
        // Nor after a while.
        for remembered in lock(&opener.state.remembered).values_mut() {
            remembered.at = Instant::now().checked_sub(REMEMBERED).expect("a time");
        }
        assert_eq!(open("a.example", HOUR).await, 1);
    }

    #[tokio::test]
    async fn what_is_remembered_is_bounded() {
        let (_, opener, _opened) = opener(Duration::ZERO);
        for number in 0..2 * REMEMBERED_MAX as u32 / 1000 {
            let addresses: Vec<_> = (number * 1000..(number + 1) * 1000)
                .map(|it| (IpAddr::V4(Ipv4Addr::from_bits(0xcb00_0000 + it)), HOUR))
                .collect();
            assert!(opener.open(&asker(2), "a.example", &addresses).await);
            assert!(lock(&opener.state.remembered).len() <= REMEMBERED_MAX);
        }
    }
}
