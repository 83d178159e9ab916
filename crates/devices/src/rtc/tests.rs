use super::*;

fn read(rtc: &mut Rtc, register: u8) -> u8 {
    rtc.write(SELECT, &[register]);
    let mut value = [0];
    rtc.read(DATA, &mut value);
    value[0]
}

fn at(seconds: u64) -> Rtc {
    Rtc {
        now: Box::new(move || seconds),
        selected: 0,
    }
}

#[test]
fn the_date_is_read_in_bcd() {
    // 2026-11-21 10:05:59 UTC, a Saturday.
    let mut rtc = at(1_795_255_559);
    let registers = [
        YEAR,
        CENTURY,
        MONTH,
        DAY,
        HOURS,
        MINUTES,
        SECONDS,
        DAY_OF_WEEK,
    ];
    let read = registers.map(|register| read(&mut rtc, register));
    assert_eq!(read, [0x26, 0x20, 0x11, 0x21, 0x10, 0x05, 0x59, 7]);
}

#[test]
fn leap_years_and_ends_of_years_are_right() {
    for (days, date) in [
        (0, (1970, 1, 1)),
        (364, (1970, 12, 31)),
        (365, (1971, 1, 1)),
        (11_016, (2000, 2, 29)),
        (11_017, (2000, 3, 1)),
        (19_782, (2024, 2, 29)),
        (47_540, (2100, 2, 28)),
        (47_541, (2100, 3, 1)),
    ] {
        assert_eq!(civil(days), date, "day {days}");
    }
}

#[test]
fn status_reports_no_update_in_progress_and_a_good_battery() {
    let mut rtc = at(0);
    assert_eq!(read(&mut rtc, STATUS_A) & 0x80, 0);
    assert_eq!(read(&mut rtc, STATUS_D), 0x80);
}

#[test]
fn the_nmi_mask_bit_is_ignored_and_registers_are_read_only() {
    let mut rtc = at(59);
    assert_eq!(read(&mut rtc, 0x80 | SECONDS), 0x59);
    rtc.write(DATA, &[0x11]);
    assert_eq!(read(&mut rtc, SECONDS), 0x59);
    assert_eq!(read(&mut rtc, 0x7f), 0);
}

#[test]
fn a_saved_clock_still_has_its_register_selected() {
    let mut rtc = Rtc::new();
    rtc.write(SELECT, &[STATUS_D]);
    let mut restored = Rtc::restore(&rtc.save());
    assert_eq!(restored.save(), rtc.save());
    let mut value = [0];
    restored.read(DATA, &mut value);
    assert_eq!(value, [0x80]);
}
