package roostream;

import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.charset.StandardCharsets;

/**
 * The event time of a record. NOTHING if the record is not an event, heartbeat or end marker of this version, if its protobuf is
 * damaged, if its time differs from the Kafka timestamp, or if the name of its producer is too long to be stored. Python sees every
 * such record and decides what becomes of it.
 */
final class TimeSignal {
    enum Kind { NOTHING, EVENT, HEARTBEAT, END_MARKER }

    private static final int VERSION = 1;
    private static final long MAX_TIME_MS = 253_402_300_799_999L; // as roostream/wire/event_checks.py
    private static final int MAX_PRODUCER_BYTES = 1024; // as there
    private static final int HEADER_TIME = 5;

    final Kind kind;
    final long timeMs;
    final String producer;

    /** A heartbeat or end marker without unknown fields: Python need not see it. */
    final boolean isPlain;

    private TimeSignal(Kind kind, long timeMs, String producer, boolean isPlain) {
        this.kind = kind;
        this.timeMs = timeMs;
        this.producer = producer;
        this.isPlain = isPlain;
    }

    static TimeSignal of(byte[] in) {
        int at = Envelope.valueAt(in);
        if (in.length < at + 2 || in[at + 1] != VERSION) {
            return nothing();
        }
        boolean isEvent = in[at] == 1 || in[at] == 2;
        if (!isEvent && in[at] != 6 && in[at] != 7) {
            return nothing();
        }
        Walk walk = new Walk(in, at + 2, in.length);
        if (isEvent) {
            long timeMs = walk.eventTime();
            return checked(in, Kind.EVENT, timeMs, "", false);
        }
        boolean isHeartbeat = in[at] == 6;
        walk.timeMark(isHeartbeat);
        return checked(in, isHeartbeat ? Kind.HEARTBEAT : Kind.END_MARKER, walk.timeMs, walk.producer, walk.isPlain);
    }

    private static TimeSignal checked(byte[] in, Kind kind, long timeMs, String producer, boolean isPlain) {
        boolean isValid = timeMs >= 1 && timeMs <= MAX_TIME_MS && timeMs == Envelope.timestampOf(in);
        return isValid ? new TimeSignal(kind, timeMs, producer, isPlain) : nothing();
    }

    private static TimeSignal nothing() {
        return new TimeSignal(Kind.NOTHING, Long.MIN_VALUE, "", false);
    }

    /** Iterates over the fields of one protobuf message; `at` becomes -1 if the message is damaged. */
    private static final class Walk {
        private final ByteBuffer data;
        private final int end;
        private int at;
        private int field;
        private int type;
        private int size; // of a field's value
        long timeMs = Long.MIN_VALUE;
        String producer = "";
        boolean isPlain = true;

        Walk(byte[] data, int at, int end) {
            this.data = ByteBuffer.wrap(data).order(ByteOrder.LITTLE_ENDIAN);
            this.at = at;
            this.end = end;
        }

        /** Header.time_ms of an impression or engagement; MIN_VALUE if it is missing or the message is damaged. */
        long eventTime() {
            long found = Long.MIN_VALUE;
            while (next()) {
                if (field == 1 && type == 2) {
                    Walk header = new Walk(data.array(), at, at + size);
                    while (header.next()) {
                        if (header.field == HEADER_TIME && header.type == 1) {
                            found = data.getLong(header.at);
                        }
                        header.at += header.size;
                    }
                    if (header.at < 0) {
                        return Long.MIN_VALUE;
                    }
                }
                at += size;
            }
            return at < 0 ? Long.MIN_VALUE : found;
        }

        /** Reads a Heartbeat or EndMarker: time_ms = 1, and producer = 2 of a Heartbeat. */
        void timeMark(boolean hasProducer) {
            boolean isTooLong = false;
            while (next()) {
                if (field == 1 && type == 1) {
                    timeMs = data.getLong(at);
                } else if (hasProducer && field == 2 && type == 2) {
                    isTooLong = size > MAX_PRODUCER_BYTES;
                    producer = isTooLong ? "" : new String(data.array(), at, size, StandardCharsets.UTF_8);
                    isPlain &= isAscii(at, size);
                } else {
                    isPlain = false;
                }
                at += size;
            }
            if (at < 0 || isTooLong) {
                timeMs = Long.MIN_VALUE;
                isPlain = false;
            }
        }

        private boolean isAscii(int from, int bytes) {
            for (int i = from; i < from + bytes; i++) {
                if (data.get(i) < 0) {
                    return false;
                }
            }
            return true;
        }

        /** Moves to the next field's value; false at the end and for damaged bytes. */
        private boolean next() {
            if (at < 0 || at >= end) {
                return false;
            }
            long tag = varint();
            field = (int) (tag >>> 3);
            type = (int) (tag & 7);
            long bytes = switch (type) {
                case 0 -> lengthOfVarint();
                case 1 -> 8;
                case 2 -> varint();
                case 5 -> 4;
                default -> -1;
            };
            if (at < 0 || tag <= 7 || tag > 0xFFFFFFFFL || bytes < 0 || bytes > end - at) {
                at = -1;
                return false;
            }
            size = (int) bytes;
            return true;
        }

        private int lengthOfVarint() {
            int from = at;
            varint();
            int length = at - from;
            at = at < 0 ? -1 : from;
            return length;
        }

        private long varint() {
            long value = 0;
            for (int shift = 0; at >= 0 && shift < 70; shift += 7) {
                if (at >= end) {
                    break;
                }
                byte b = data.get(at++);
                value |= (long) (b & 127) << shift;
                if (b >= 0) {
                    return value;
                }
            }
            at = -1;
            return -1;
        }
    }
}
