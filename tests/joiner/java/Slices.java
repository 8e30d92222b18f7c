package roostream;

import java.util.Scanner;

/** Reads "restore MS", "advance MS" and "next" from standard input; prints each emitted watermark, and "stored MS" at the end. */
public final class Slices {
    public static void main(String[] args) {
        WatermarkSlices slices = new WatermarkSlices();
        Scanner in = new Scanner(System.in);
        while (in.hasNext()) {
            switch (in.next()) {
                case "restore" -> slices.restore(in.nextLong());
                case "advance" -> slices.advance(in.nextLong());
                default -> System.out.println(slices.hasNext() ? slices.next() : "-");
            }
        }
        System.out.println("stored " + slices.emittedMs());
    }
}
