use super::publish::Publish;
use super::*;
use proptest::prelude::*;

fn policy(allow: &[&str], deny: &[&str]) -> Policy {
    let rules = |texts: &[&str]| texts.iter().map(|it| it.parse().expect("a rule")).collect();
    Policy {
        allow: rules(allow),
        deny: rules(deny),
    }
}

fn ip(text: &str) -> IpAddr {
    text.parse().expect("an address")
}

#[test]
fn by_default_only_public_addresses_are_permitted() {
    let open = Policy::default();
    for public in [
        "1.1.1.1",
        "169.253.0.1",
        "172.32.0.1",
        "2001:db8::1",
        "2606:4700::1111",
    ] {
        assert!(open.permits(ip(public), 6, 80), "{public}");
        assert!(opened_by_name(ip(public)), "{public}");
    }
    for closed in [
        "0.0.0.0",
        "10.1.2.3",
        "100.64.0.1",
        "127.0.0.1",
        "169.254.169.254",
        "168.63.129.16",
        "172.31.0.1",
        "192.168.1.1",
        "224.0.0.1",
        "255.255.255.255",
        "::1",
        "::ffff:10.0.0.1",
        "fe80::1",
        "fd00:ec2::254",
        "ff02::1",
        "2002:a00:1::1",
        "64:ff9b::a00:1",
    ] {
        assert!(!open.permits(ip(closed), 6, 80), "{closed}");
        assert!(!opened_by_name(ip(closed)), "{closed}");
    }
}

#[test]
fn allow_overrides_deny_overrides_the_default() {
    let it = policy(&["10.0.0.5:5432", "1.1.1.0/24:53/udp"], &["all"]);
    assert!(it.permits(ip("10.0.0.5"), 6, 5432));
    assert!(!it.permits(ip("10.0.0.5"), 6, 5433));
    assert!(it.permits(ip("1.1.1.1"), 17, 53));
    assert!(!it.permits(ip("1.1.1.1"), 6, 53));
    assert!(!it.permits(ip("8.8.8.8"), 6, 53));
    let it = policy(&[], &["8.0.0.0/8", "all:25"]);
    assert!(!it.permits(ip("8.8.8.8"), 1, 0));
    assert!(!it.permits(ip("9.9.9.9"), 6, 25));
    assert!(it.permits(ip("9.9.9.9"), 6, 26));
    assert!(it.permits(ip("9.9.9.9"), 1, 0));
}

#[test]
fn names_resolve_only_if_the_policy_allows() {
    let it = policy(&["example.com", "*.debian.org:443"], &["all"]);
    assert!(it.resolves("example.com") && !it.opened_at("example.com").is_empty());
    assert!(it.resolves("deb.debian.org") && it.resolves("a.b.debian.org"));
    assert!(!it.resolves("debian.org") && !it.resolves("www.example.com"));
    assert!(!it.resolves("notdebian.org") && !it.resolves("example.com.evil.org"));
    let it = policy(&[], &["*.ads.example"]);
    assert!(it.resolves("example.com") && !it.resolves("x.ads.example"));
    assert!(it.opened_at("example.com").is_empty());
    assert!(policy(&[], &["all:25"]).resolves("example.com"));
}

#[test]
fn a_printed_rule_parses_to_itself() {
    for text in [
        "all",
        "all:25",
        "host:5432",
        "host:1-9/udp",
        "10.0.0.0/8",
        "10.0.0.1/32:80/tcp",
        "[fd00::/8]:443",
        "[fd00::1/128]",
        "example.com",
        "*.example.com:443",
        "x_y.z/udp",
    ] {
        let rule: Rule = text.parse().expect(text);
        assert_eq!(rule.to_string(), text);
    }
    assert_eq!(
        "fd00::1".parse::<Rule>().expect("a rule").to_string(),
        "[fd00::1/128]"
    );
    assert_eq!(
        "Example.COM.".parse::<Rule>().expect("a rule").to_string(),
        "example.com"
    );
}

#[test]
fn errors_of_invalid_rules_say_what_is_wrong() {
    for (text, why) in [
        ("", "a domain is"),
        ("10.0.0.1/8", "not a range of addresses"),
        ("10.0.0", "a domain is"),
        ("host", "a rule for the host"),
        ("example.com:0", "a port is"),
        ("example.com:9-1", "a port is"),
        ("example.com/sctp", "the protocol is"),
        ("[fd00::1", "a `]` is missing"),
        ("[fd00::1]x", "after `]` comes"),
        ("*", "a domain is"),
        ("*.*.x", "a domain is"),
        ("b\u{fc}cher.example", "a domain is"),
    ] {
        let error = text.parse::<Rule>().expect_err(text).to_string();
        assert!(error.contains(why), "{text}: {error}");
    }
}

#[test]
fn ports_are_published_on_loopback_by_default() {
    for (text, printed) in [
        ("8080:80", "127.0.0.1:8080:80/tcp"),
        ("0.0.0.0:8080:80", "0.0.0.0:8080:80/tcp"),
        ("[::]:53:5353/udp", "[::]:53:5353/udp"),
        ("8000-8009:9000-9009", "127.0.0.1:8000-8009:9000-9009/tcp"),
        ("65535:65535", "127.0.0.1:65535:65535/tcp"),
    ] {
        let publish: Publish = text.parse().expect(text);
        assert_eq!(publish.to_string(), printed);
        assert_eq!(printed.parse::<Publish>().ok(), Some(publish));
    }
    for text in [
        "80",
        "x:80",
        "0:80",
        "1-3:1-2",
        "1-1025:1-1025",
        "[::1]:1:1",
        "1:1/icmp",
        "a:1:1",
    ] {
        assert!(text.parse::<Publish>().is_err(), "{text}");
    }
}

#[test]
fn published_ports_collide_if_they_match_the_same_packet() {
    let collide = |a: &str, b: &str| {
        let (a, b): (Publish, Publish) = (a.parse().expect(a), b.parse().expect(b));
        assert_eq!(a.collides(&b), b.collides(&a));
        a.collides(&b)
    };
    assert!(collide("80:80", "80:81"));
    assert!(collide("80:80", "0.0.0.0:80:81"));
    assert!(collide("80-90:80-90", "85:1"));
    assert!(!collide("80-90:80-90", "91:1"));
    assert!(!collide("80:80", "80:80/udp"));
    assert!(!collide("80:80", "[::]:80:80"));
    assert!(!collide("10.0.0.1:80:80", "10.0.0.2:80:80"));
}

proptest! {
    #[test]
    fn any_text_that_parses_as_a_rule_round_trips(text in "[a-z0-9:./*\\[\\]-]{0,24}") {
        if let Ok(rule) = text.parse::<Rule>() {
            prop_assert_eq!(rule.to_string().parse::<Rule>().ok(), Some(rule));
        }
        if let Ok(publish) = text.parse::<Publish>() {
            prop_assert_eq!(publish.pairs().count(), usize::from(publish.count));
            prop_assert_eq!(publish.to_string().parse::<Publish>().ok(), Some(publish));
        }
    }
}
