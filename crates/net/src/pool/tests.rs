use super::*;
use crate::pool::choose::{choose_v4, choose_v6};
use proptest::prelude::*;

fn cidr(text: &str) -> Cidr {
    text.parse().expect("a range")
}

fn ranges(v4: &str) -> Ranges {
    Ranges::new(cidr(v4), cidr("fd00:1::/64")).expect("ranges")
}

#[test]
fn freed_addresses_are_reused_last() {
    let mut pool = Pool::new(ranges("10.9.0.0/29"));
    let all: Vec<_> = (0..5).map(|_| pool.take().expect("a free one")).collect();
    assert_eq!(all[0].to_string(), "10.9.0.2");
    assert_eq!(all[4].to_string(), "10.9.0.6");
    assert_eq!(
        pool.take().expect_err("none is free").to_string(),
        "all addresses of 10.9.0.0/29 are in use"
    );
    pool.free(all[3]);
    pool.free(all[1]);
    pool.free(all[1]);
    assert_eq!(pool.take().ok(), Some(all[3]));
    pool.free(all[3]);
    assert_eq!(pool.take().ok(), Some(all[1]));
    assert_eq!(pool.take().ok(), Some(all[3]));
    assert!(pool.take().is_err());
}

#[test]
fn an_address_can_be_claimed_once_only() {
    let mut pool = Pool::new(ranges("10.9.0.0/29"));
    assert!(pool.claim(Ipv4Addr::new(10, 9, 0, 2)));
    assert!(!pool.claim(Ipv4Addr::new(10, 9, 0, 2)));
    for not_for_vms in [
        [10, 9, 0, 0],
        [10, 9, 0, 1],
        [10, 9, 0, 7],
        [10, 9, 0, 8],
        [10, 8, 0, 3],
    ] {
        assert!(!pool.claim(Ipv4Addr::from(not_for_vms)), "{not_for_vms:?}");
    }
    assert_eq!(pool.take().ok(), Some(Ipv4Addr::new(10, 9, 0, 3)));
}

#[test]
fn an_ipv6_address_has_the_host_part_of_its_ipv4_address() {
    let ranges = ranges("10.9.0.0/16");
    assert_eq!(ranges.gateway().to_string(), "10.9.0.1");
    assert_eq!(ranges.gateway6().to_string(), "fd00:1::1");
    assert_eq!(
        ranges.v6_of(Ipv4Addr::new(10, 9, 1, 2)).to_string(),
        "fd00:1::102"
    );
}

#[test]
fn pools_too_small_or_of_the_wrong_kind_are_refused() {
    for (v4, v6) in [
        ("10.0.0.0/31", "fd00::/64"),
        ("10.0.0.0/8", "fd00::/64"),
        ("10.0.0.0/16", "fd00::/97"),
        ("fd00::/64", "fd00::/64"),
        ("10.0.0.0/16", "10.0.0.0/16"),
    ] {
        assert!(Ranges::new(cidr(v4), cidr(v6)).is_err(), "{v4} {v6}");
    }
}

#[test]
fn chosen_ranges_do_not_overlap_host_routes() {
    let seed = [1, 2, 3, 4, 5];
    let both = |taken: &[Cidr]| {
        let v4 = choose_v4(taken).expect("a range").to_string();
        (v4, choose_v6(taken, seed).expect("a range").to_string())
    };
    let (v4, v6) = both(&[cidr("0.0.0.0/0")]);
    assert_eq!(v4, "10.118.0.0/16");
    assert_eq!(v6, "fd01:203:405::/64");
    let (v4, v6) = both(&[
        cidr("10.118.7.0/24"),
        cidr("fd01:203:405::/64"),
        cidr("10.119.0.0/16"),
    ]);
    assert_eq!(v4, "10.120.0.0/16");
    assert_eq!(v6, "fd01:203:405:1::/64");
    let (v4, _) = both(&[cidr("10.0.0.0/8")]);
    assert_eq!(v4, "172.24.0.0/16");
    assert!(choose_v4(&[cidr("10.0.0.0/8"), cidr("172.16.0.0/12")]).is_err());
    assert!(choose_v6(&[cidr("fd00::/8")], seed).is_err());
}

proptest! {
    /// No sequence of take, claim and free assigns an address twice.
    #[test]
    fn no_address_is_assigned_twice(steps in proptest::collection::vec((0u8..3, 0usize..8, 0u8..10), 0..200)) {
        let mut pool = Pool::new(ranges("10.9.0.0/28"));
        let mut had: Vec<Ipv4Addr> = Vec::new();
        for (what, place, low) in steps {
            match what {
                0 => {
                    if let Ok(address) = pool.take() {
                        prop_assert!(!had.contains(&address));
                        had.push(address);
                    } else {
                        prop_assert_eq!(had.len(), 13);
                    }
                }
                1 if place < had.len() => pool.free(had.swap_remove(place)),
                1 => {}
                _ => {
                    let address = Ipv4Addr::new(10, 9, 0, low);
                    if pool.claim(address) {
                        prop_assert!(!had.contains(&address));
                        had.push(address);
                    }
                }
            }
        }
    }
}
