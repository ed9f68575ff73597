"""Tables about countries for the corpus: capital, ISO code, continent. Data only."""

# name as it stands in a sentence | capital | ISO 3166 code | continent | other names, comma-separated
COUNTRIES = """
Afghanistan | Kabul | AF | Asia |
Albania | Tirana | AL | Europe |
Algeria | Algiers | DZ | Africa |
Andorra | Andorra la Vella | AD | Europe |
Angola | Luanda | AO | Africa |
Antigua and Barbuda | Saint John's | AG | North America | Antigua
Argentina | Buenos Aires | AR | South America |
Armenia | Yerevan | AM | Asia |
Australia | Canberra | AU | Oceania |
Austria | Vienna | AT | Europe |
Azerbaijan | Baku | AZ | Asia |
the Bahamas | Nassau | BS | North America | Bahamas
Bahrain | Manama | BH | Asia |
Bangladesh | Dhaka | BD | Asia |
Barbados | Bridgetown | BB | North America |
Belarus | Minsk | BY | Europe |
Belgium | Brussels | BE | Europe |
Belize | Belmopan | BZ | North America |
Benin | Porto-Novo | BJ | Africa |
Bhutan | Thimphu | BT | Asia |
Bolivia | Sucre | BO | South America |
Bosnia and Herzegovina | Sarajevo | BA | Europe | Bosnia
Botswana | Gaborone | BW | Africa |
Brazil | Brasília | BR | South America |
Brunei | Bandar Seri Begawan | BN | Asia |
Bulgaria | Sofia | BG | Europe |
Burkina Faso | Ouagadougou | BF | Africa |
Burundi | Gitega | BI | Africa |
Cambodia | Phnom Penh | KH | Asia |
Cameroon | Yaoundé | CM | Africa |
Canada | Ottawa | CA | North America |
Cape Verde | Praia | CV | Africa | Cabo Verde
the Central African Republic | Bangui | CF | Africa | Central African Republic
Chad | N'Djamena | TD | Africa |
Chile | Santiago | CL | South America |
China | Beijing | CN | Asia |
Colombia | Bogotá | CO | South America |
the Comoros | Moroni | KM | Africa | Comoros
the Democratic Republic of the Congo | Kinshasa | CD | Africa | DR Congo
the Republic of the Congo | Brazzaville | CG | Africa | Congo-Brazzaville
Costa Rica | San José | CR | North America |
Croatia | Zagreb | HR | Europe |
Cuba | Havana | CU | North America |
Cyprus | Nicosia | CY | Asia |
the Czech Republic | Prague | CZ | Europe | Czechia, Czech Republic
Denmark | Copenhagen | DK | Europe |
Djibouti | Djibouti | DJ | Africa |
Dominica | Roseau | DM | North America |
the Dominican Republic | Santo Domingo | DO | North America | Dominican Republic
East Timor | Dili | TL | Asia | Timor-Leste
Ecuador | Quito | EC | South America |
Egypt | Cairo | EG | Africa |
El Salvador | San Salvador | SV | North America |
Equatorial Guinea | Malabo | GQ | Africa |
Eritrea | Asmara | ER | Africa |
Estonia | Tallinn | EE | Europe |
Eswatini | Mbabane | SZ | Africa | Swaziland
Ethiopia | Addis Ababa | ET | Africa |
Fiji | Suva | FJ | Oceania |
Finland | Helsinki | FI | Europe |
France | Paris | FR | Europe |
Gabon | Libreville | GA | Africa |
the Gambia | Banjul | GM | Africa | Gambia
Georgia | Tbilisi | GE | Asia |
Germany | Berlin | DE | Europe |
Ghana | Accra | GH | Africa |
Greece | Athens | GR | Europe |
Grenada | Saint George's | GD | North America |
Guatemala | Guatemala City | GT | North America |
Guinea | Conakry | GN | Africa |
Guinea-Bissau | Bissau | GW | Africa |
Guyana | Georgetown | GY | South America |
Haiti | Port-au-Prince | HT | North America |
Honduras | Tegucigalpa | HN | North America |
Hungary | Budapest | HU | Europe |
Iceland | Reykjavik | IS | Europe |
India | New Delhi | IN | Asia |
Indonesia | Jakarta | ID | Asia |
Iran | Tehran | IR | Asia |
Iraq | Baghdad | IQ | Asia |
Ireland | Dublin | IE | Europe |
Israel | Jerusalem | IL | Asia |
Italy | Rome | IT | Europe |
Ivory Coast | Yamoussoukro | CI | Africa | Côte d'Ivoire
Jamaica | Kingston | JM | North America |
Japan | Tokyo | JP | Asia |
Jordan | Amman | JO | Asia |
Kazakhstan | Astana | KZ | Asia |
Kenya | Nairobi | KE | Africa |
Kiribati | South Tarawa | KI | Oceania |
Kuwait | Kuwait City | KW | Asia |
Kyrgyzstan | Bishkek | KG | Asia |
Laos | Vientiane | LA | Asia |
Latvia | Riga | LV | Europe |
Lebanon | Beirut | LB | Asia |
Lesotho | Maseru | LS | Africa |
Liberia | Monrovia | LR | Africa |
Libya | Tripoli | LY | Africa |
Liechtenstein | Vaduz | LI | Europe |
Lithuania | Vilnius | LT | Europe |
Luxembourg | Luxembourg City | LU | Europe |
Madagascar | Antananarivo | MG | Africa |
Malawi | Lilongwe | MW | Africa |
Malaysia | Kuala Lumpur | MY | Asia |
the Maldives | Malé | MV | Asia | Maldives
Mali | Bamako | ML | Africa |
Malta | Valletta | MT | Europe |
the Marshall Islands | Majuro | MH | Oceania | Marshall Islands
Mauritania | Nouakchott | MR | Africa |
Mauritius | Port Louis | MU | Africa |
Mexico | Mexico City | MX | North America |
Micronesia | Palikir | FM | Oceania |
Moldova | Chișinău | MD | Europe |
Monaco | Monaco | MC | Europe |
Mongolia | Ulaanbaatar | MN | Asia |
Montenegro | Podgorica | ME | Europe |
Morocco | Rabat | MA | Africa |
Mozambique | Maputo | MZ | Africa |
Myanmar | Naypyidaw | MM | Asia | Burma
Namibia | Windhoek | NA | Africa |
Nauru | Yaren | NR | Oceania |
Nepal | Kathmandu | NP | Asia |
the Netherlands | Amsterdam | NL | Europe | Netherlands, Holland
New Zealand | Wellington | NZ | Oceania |
Nicaragua | Managua | NI | North America |
Niger | Niamey | NE | Africa |
Nigeria | Abuja | NG | Africa |
North Korea | Pyongyang | KP | Asia |
North Macedonia | Skopje | MK | Europe | Macedonia
Norway | Oslo | NO | Europe |
Oman | Muscat | OM | Asia |
Pakistan | Islamabad | PK | Asia |
Palau | Ngerulmud | PW | Oceania |
Palestine | Ramallah | PS | Asia |
Panama | Panama City | PA | North America |
Papua New Guinea | Port Moresby | PG | Oceania |
Paraguay | Asunción | PY | South America |
Peru | Lima | PE | South America |
the Philippines | Manila | PH | Asia | Philippines
Poland | Warsaw | PL | Europe |
Portugal | Lisbon | PT | Europe |
Qatar | Doha | QA | Asia |
Romania | Bucharest | RO | Europe |
Russia | Moscow | RU | Europe |
Rwanda | Kigali | RW | Africa |
Saint Kitts and Nevis | Basseterre | KN | North America |
Saint Lucia | Castries | LC | North America |
Saint Vincent and the Grenadines | Kingstown | VC | North America | Saint Vincent
Samoa | Apia | WS | Oceania |
San Marino | City of San Marino | SM | Europe |
São Tomé and Príncipe | São Tomé | ST | Africa | Sao Tome and Principe
Saudi Arabia | Riyadh | SA | Asia |
Senegal | Dakar | SN | Africa |
Serbia | Belgrade | RS | Europe |
the Seychelles | Victoria | SC | Africa | Seychelles
Sierra Leone | Freetown | SL | Africa |
Singapore | Singapore | SG | Asia |
Slovakia | Bratislava | SK | Europe |
Slovenia | Ljubljana | SI | Europe |
the Solomon Islands | Honiara | SB | Oceania | Solomon Islands
Somalia | Mogadishu | SO | Africa |
South Africa | Pretoria | ZA | Africa |
South Korea | Seoul | KR | Asia | Korea
South Sudan | Juba | SS | Africa |
Spain | Madrid | ES | Europe |
Sri Lanka | Sri Jayawardenepura Kotte | LK | Asia |
Sudan | Khartoum | SD | Africa |
Suriname | Paramaribo | SR | South America |
Sweden | Stockholm | SE | Europe |
Switzerland | Bern | CH | Europe |
Syria | Damascus | SY | Asia |
Tajikistan | Dushanbe | TJ | Asia |
Tanzania | Dodoma | TZ | Africa |
Thailand | Bangkok | TH | Asia |
Togo | Lomé | TG | Africa |
Tonga | Nuku'alofa | TO | Oceania |
Trinidad and Tobago | Port of Spain | TT | North America | Trinidad
Tunisia | Tunis | TN | Africa |
Turkey | Ankara | TR | Asia | Türkiye
Turkmenistan | Ashgabat | TM | Asia |
Tuvalu | Funafuti | TV | Oceania |
Uganda | Kampala | UG | Africa |
Ukraine | Kyiv | UA | Europe |
the United Arab Emirates | Abu Dhabi | AE | Asia | UAE, the UAE, United Arab Emirates
the United Kingdom | London | GB | Europe | UK, the UK, United Kingdom, Great Britain
the United States | Washington, D.C. | US | North America | USA, the USA, the US, United States, America
Uruguay | Montevideo | UY | South America |
Uzbekistan | Tashkent | UZ | Asia |
Vanuatu | Port Vila | VU | Oceania |
Vatican City | Vatican City | VA | Europe | the Vatican
Venezuela | Caracas | VE | South America |
Vietnam | Hanoi | VN | Asia |
Yemen | Sanaa | YE | Asia |
Zambia | Lusaka | ZM | Africa |
Zimbabwe | Harare | ZW | Africa |
"""

# country | capital, in Chinese
CHINESE = """
中国 | 北京
法国 | 巴黎
德国 | 柏林
日本 | 东京
英国 | 伦敦
美国 | 华盛顿
俄罗斯 | 莫斯科
意大利 | 罗马
西班牙 | 马德里
葡萄牙 | 里斯本
希腊 | 雅典
埃及 | 开罗
印度 | 新德里
韩国 | 首尔
泰国 | 曼谷
越南 | 河内
加拿大 | 渥太华
巴西 | 巴西利亚
阿根廷 | 布宜诺斯艾利斯
墨西哥 | 墨西哥城
澳大利亚 | 堪培拉
新西兰 | 惠灵顿
荷兰 | 阿姆斯特丹
比利时 | 布鲁塞尔
瑞士 | 伯尔尼
奥地利 | 维也纳
瑞典 | 斯德哥尔摩
挪威 | 奥斯陆
丹麦 | 哥本哈根
芬兰 | 赫尔辛基
波兰 | 华沙
土耳其 | 安卡拉
伊朗 | 德黑兰
肯尼亚 | 内罗毕
古巴 | 哈瓦那
智利 | 圣地亚哥
"""

# country with its preposition | capital, in French
FRENCH = """
de la France | Paris
de l'Allemagne | Berlin
de l'Italie | Rome
de l'Espagne | Madrid
du Portugal | Lisbonne
de la Belgique | Bruxelles
de la Suisse | Berne
de l'Autriche | Vienne
des Pays-Bas | Amsterdam
du Royaume-Uni | Londres
de l'Irlande | Dublin
de la Suède | Stockholm
de la Norvège | Oslo
du Danemark | Copenhague
de la Finlande | Helsinki
de la Pologne | Varsovie
de la Grèce | Athènes
de la Turquie | Ankara
de la Russie | Moscou
de la Chine | Pékin
du Japon | Tokyo
de la Corée du Sud | Séoul
de l'Inde | New Delhi
de la Thaïlande | Bangkok
du Vietnam | Hanoï
de l'Égypte | Le Caire
du Maroc | Rabat
de l'Algérie | Alger
de la Tunisie | Tunis
du Sénégal | Dakar
du Kenya | Nairobi
du Canada | Ottawa
des États-Unis | Washington
du Mexique | Mexico
du Brésil | Brasilia
de l'Argentine | Buenos Aires
du Chili | Santiago
du Pérou | Lima
de Cuba | La Havane
de l'Australie | Canberra
"""
